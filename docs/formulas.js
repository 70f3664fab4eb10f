// Formulas are marked by arithmatex; MathJax looks at nothing else.
window.MathJax = {
  tex: {
    inlineMath: [["\\(", "\\)"]],
    displayMath: [["\\[", "\\]"]],
  },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};
