"""`repro report`: read the store, judge the ledger, draw the figures, write one self-contained page."""

from __future__ import annotations

import json as json_module
import os
import tempfile
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.config.errors import ConfigError
from repro.report import measured, simulated, validate, verdicts

if TYPE_CHECKING:
    from repro.report.figures.style import Drawing

HERE = Path(__file__).parent


@dataclass
class Report:
    """What was written."""

    page: Path
    claims: int
    verdicts: dict[str, int]
    experiments: int
    """Measured ones."""
    simulated: int
    comparisons: int
    figures: list[Path] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """By figure, the command that would fill or complete it."""
    remarks: list[str] = field(default_factory=list)
    """What a reader must know about the store: torn lines, other protocols."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**vars(self), "page": str(self.page), "figures": [str(path) for path in self.figures]}


def command(results: Path = Path("results"), out: Path = Path("reports/out"), json: bool = False) -> int:
    """Write the report on the store ``results`` to ``out`` and print where; 0."""
    report = build(Path(results), Path(out))
    if json:
        print(json_module.dumps(report.as_dict(), indent=2))
        return 0
    for remark in report.remarks:
        print(f"note: {remark}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.verdicts.items())
    drawn = len(report.figures) // 2
    seen = f"{report.experiments} experiments, {report.simulated} simulated"
    print(f"{report.claims} claims ({counts}); {seen}, {drawn} figures")
    print(f"report: {report.page}")
    return 0


def build(results: Path, out: Path) -> Report:
    """Write ``out``/index.html and ``out``/figures/*.svg, *.png.  ``ConfigError`` if ``out`` is no folder."""
    from repro.claims.judge import judge
    from repro.claims.ledger import load
    from repro.claims.table import table
    from repro.report.figures import draw_all
    from repro.results.store import Store

    store = Store(results)
    records = store.records()
    selection = measured.select(records)
    ledger = load()
    judged = judge(ledger, records)
    lines = table(judged)
    claims = [verdicts.claim_view(*pair, ledger) for pair in zip(judged, lines, strict=True)]
    counts = verdicts.summary(claims)
    points = validate.points(judged, records)
    drawings = draw_all(selection.experiments, selection.comparisons, selection.simulated, points)
    remarks = _remarks(results, records, selection, store.torn)

    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", str(out), f"a folder that can be written: {error.strerror}") from None
    report = Report(
        page=out / "index.html",
        claims=len(claims),
        verdicts={entry["verdict"]: entry["count"] for entry in counts},
        experiments=len(selection.experiments),
        simulated=len(selection.simulated),
        comparisons=len(selection.comparisons),
        missing={drawing.id: drawing.missing for drawing in drawings if drawing.missing},
        remarks=remarks,
    )
    figures = [_save(drawing, out / "figures", report) for drawing in drawings]
    page = render(
        {
            "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "results": str(results),
            "claims": claims,
            "groups": list(dict.fromkeys(claim["group"] for claim in claims)),
            "summary": counts,
            "figures": figures,
            "experiments": [measured.experiment_row(record) for record in selection.experiments],
            "simulated": [simulated.experiment_row(record) for record in selection.simulated],
            "machines": measured.machines([*selection.experiments, *selection.simulated]),
            "comparisons": selection.comparisons,
            "remarks": remarks,
        }
    )
    _write(report.page, page.encode())
    return report


def render(context: dict[str, Any]) -> str:
    """The page as text; a name that the template misses is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    style = (HERE / "style.css").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(style=style, **context)


def _save(drawing: Drawing, folder: Path, report: Report) -> dict[str, Any]:
    """Write a figure's two files; what the template needs of it.  Old files of a now empty figure go."""
    from repro.report.figures import style

    text = ""
    if drawing.figure is None:
        for ending in ("svg", "png"):
            (folder / f"{drawing.id}.{ending}").unlink(missing_ok=True)
    else:
        text = style.svg(drawing)
        alone = (
            text.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
            if "xmlns=" not in text
            else text
        )
        for path, content in (
            (folder / f"{drawing.id}.svg", alone.encode()),
            (folder / f"{drawing.id}.png", style.png(drawing)),
        ):
            _write(path, content)
            report.figures.append(path)
    return {
        "id": drawing.id,
        "title": drawing.title,
        "caption": drawing.caption,
        "records": {name: verdicts.anchor(drawing.evidence, name) for name in drawing.records},
        "missing": drawing.missing,
        "svg": text,
    }


def _remarks(results: Path, records: list[Any], selection: measured.Selection, torn: list[str]) -> list[str]:
    remarks = list(torn)
    if not records:
        remarks.append(f"no records in {results}: the page shows the ledger and its analytic evidence only")
    if selection.foreign:
        remarks.append(
            f"{selection.foreign} records of another measurement protocol are left out: not comparable"
        )
    every = [*selection.experiments, *selection.simulated]
    failed = [record for record in every if record["outcome"] not in measured.CONCLUSIVE]
    if failed:
        names = ", ".join(
            f"{record['suite']}/{record['name']} ({record['outcome']})" for record in failed[:6]
        )
        more = f" and {len(failed) - 6} more" if len(failed) > 6 else ""
        remarks.append(f"without a conclusive result: {names}{more}; the next `repro run` runs them again")
    return remarks


def _write(path: Path, content: bytes) -> None:
    """Replace ``path`` as a whole, so that a reader never sees half a page."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
