"""Render the formulas of the pages as MathML, so that no page needs a script for them.

A hook of mkdocs: pymdownx.arithmatex marks the formulas, latex2mathml converts them.
"""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)


def on_page_content(content: str, **_) -> str:
    """Replace every formula of a page by its MathML."""
    return FORMULA.sub(_mathml, content)


def _mathml(formula: re.Match) -> str:
    tag = formula["tag"]
    display = "block" if tag == "div" else "inline"
    latex = html.unescape(formula["latex"]).strip()
    return f'<{tag} class="formula">{convert(latex, display=display)}</{tag}>'
