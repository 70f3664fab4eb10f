"""Results as text, JSON, CSV, Markdown, PNG, and one page of HTML."""

import base64
import csv
import html
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from symjax.evaluation.results import Cell, Result, Table
from symjax.figures import png
from symjax.storage import check_writable, in_bucket, replaced
from symjax.tables import aligned


def to_json(about: dict[str, Any], results: Mapping[str, Result]) -> str:
    """Return one JSON object with the keys of `about` and the values of all results.

    The bytes are the same for the same checkpoint. NaN and infinities become null.

    Args:
        about: values that identify the checkpoint: see `tasks.describe_checkpoint`.
    """
    values = dict(about)
    for result in results.values():
        values |= result.values
    text = json.dumps(
        _without_nan(values), indent=1, ensure_ascii=False, allow_nan=False
    )
    return f"{text}\n"


def to_text(result: Result) -> str:
    """Return the lines of a result and its tables, separated by empty lines."""
    printed = [_cells(x) for x in result.tables if x.printed]
    tables = (aligned(cells, str.rjust, least=6) for cells in printed)
    return "\n\n".join("\n".join(lines) for lines in (result.text, *tables) if lines)


def to_csv(table: Table) -> str:
    text = io.StringIO()
    rows = [table.columns, *_without_nan(table.rows)]
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def to_markdown(table: Table) -> str:
    columns, *rows = _cells(table)
    rows = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def to_html(title: str, results: Mapping[str, Result]) -> str:
    """Return one HTML page that contains every table and figure and loads nothing.

    Tasks that do not apply to the run have results of a single line. They come last.
    """
    parts, single_lines = [f"<h1>{html.escape(title)}</h1>"], []
    for name, result in results.items():
        if len(result.text) == 1 and not (result.tables or result.figures):
            single_lines += result.text
            continue
        parts.append(f"<h2>{html.escape(name)}</h2>")
        if result.text:
            parts.append(f"<pre>{html.escape(chr(10).join(result.text))}</pre>")
        parts += [_html_table(x) for x in result.tables if x.printed]
        for figure in result.figures:
            image = base64.b64encode(png(figure)).decode()
            source = f"data:image/png;base64,{image}"
            caption = html.escape(figure.title or figure.name)
            parts.append(f'<img alt="{caption}" src="{source}">')
    if single_lines:
        parts.append(f"<pre>{html.escape(chr(10).join(single_lines))}</pre>")
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</html>\n"
    )


STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.1em .7em;"
    "text-align:right;border-bottom:1px solid #ddd}td:first-child{text-align:left}"
    "img{max-width:100%}pre{white-space:pre-wrap}"
)


def write_folder(results: Mapping[str, Result], folder: Path | epath.Path) -> None:
    """Write every table as CSV and every figure as PNG.

    Raises:
        ValueError: a file cannot be written, or matplotlib is not installed.
    """
    for result in results.values():
        for table in result.tables:
            write(to_csv(table).encode(), folder / f"{table.name}.csv", "--out")
        for figure in result.figures:
            write(png(figure), folder / f"{figure.name}.png", "--out")


def check_file(path: Path | epath.Path, flag: str) -> None:
    """Check that a file can be written, before the measurements begin.

    Raises:
        ValueError: it cannot be written; the message names the flag.
    """
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: name a file")
    if path.exists() and not path.is_file():  # writing would replace the device
        raise ValueError(f"{flag} {path} is a device or a pipe: name a file")
    folder = path.parent if in_bucket(path) else path.absolute().parent
    if not in_bucket(path) and not folder.is_dir():
        raise ValueError(f"{flag} {path} cannot be written: no folder {path.parent}")
    check_writable(folder, f"{flag} {path}")


def write(content: bytes, path: Path | epath.Path, flag: str) -> None:
    """Write a file completely or not at all.

    Args:
        flag: the flag that names the file, for the message.
    Raises:
        ValueError: the file cannot be written.
    """
    try:
        target = path if in_bucket(path) else Path(path).absolute()
        with replaced(target.parent, path.name) as folder:
            Path(folder, path.name).write_bytes(content)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {error.strerror}") from None


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities by None, which JSON, CSV and tables can show."""
    if isinstance(value, Mapping):
        return {key: _without_nan(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(x) for x in value]
    unknown = isinstance(value, float) and not math.isfinite(value)
    return None if unknown else value


def _cells(table: Table) -> list[list[str]]:
    """Return the names of the columns and the rows, as text."""
    rows = table.columns, *_without_nan(table.rows)
    return [list(map(_cell_text, row)) for row in rows]


def _cell_text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4f}"


def _html_table(table: Table) -> str:
    def row(cells: list[str], tag: str) -> str:
        shown = (f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{''.join(shown)}</tr>"

    columns, *rows = _cells(table)
    body = "\n".join(row(cells, "td") for cells in rows)
    return f"<table>\n{row(columns, 'th')}\n{body}\n</table>"
