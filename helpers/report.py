"""Results files -> the tables in README. No number about speed, memory or accuracy stands there without a file behind it.

    python -m helpers.report            writes the tables anew between their markers
    python -m helpers.report --check    exits 1, naming the table, if one differs from its results file

A table stands between `<!-- results: NAME -->` and `<!-- /results -->`; NAME is a function in TABLES.
"""

import json
import os
import re
import sys

import pandas as pd

from helpers import results

README = results.ROOT / "README.md"
MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def markdown(table: pd.DataFrame, caption: str) -> str:
    """A table in Markdown, its caption below it."""
    lines = ["| " + " | ".join(table.columns) + " |", "|" + " --- |" * len(table.columns)]
    lines += ["| " + " | ".join(str(v) for v in row) + " |" for row in table.itertuples(index=False)]
    return "\n".join([*lines, "", f"{caption}."]) + "\n"


def run_table() -> str:
    """The notebooks as executed: where, how long, what FP8 was."""
    rows = []
    for folder in sorted(results.RECORDED.iterdir()):
        if not (folder / "summary.json").exists():
            continue
        for entry in json.loads((folder / "summary.json").read_text()):
            link = f"[{entry['notebook']}](results/{folder.name}/{entry['notebook']}.ipynb)"
            rows.append(
                {
                    "notebook as executed": link,
                    "machine": folder.name,
                    "seconds": f"{entry['seconds']:.0f}",
                    "FP8": entry["fp8"].upper(),
                }
            )
    return markdown(pd.DataFrame(rows), "Executed from start to end, kernel start included")


def training_table() -> str:
    rows, caption = results.recorded("04_training")
    table = pd.DataFrame(
        {
            "precision": rows["precision"],
            "final loss (nats)": rows["final_loss"].map("{:.3f}".format),
            "held-out prompts continued exactly": [f"{n} of 64" for n in rows["exact"]],
        }
    )
    return markdown(table, caption)


def benchmark_table() -> str:
    rows, caption = results.recorded("04_benchmark")
    table = pd.DataFrame(
        {
            "model": rows["case"],
            "variant": rows["variant"],
            "ms a step (median ± IQR)": [
                f"{m:.1f} ± {i:.1f}" for m, i in zip(rows["median_ms"], rows["iqr_ms"], strict=True)
            ],
            "peak memory (GB)": rows["allocated_gb"].map("{:.1f}".format),
        }
    )
    return markdown(table, caption)


def text_table() -> str:
    rows, caption = results.recorded("text_quality")
    groups = rows.groupby("variant", sort=False)["validation_loss"]
    table = groups.agg(["mean", "std"]).reset_index()
    kind = rows.groupby("variant", sort=False)["kind"].first().map({"measured": "REAL", "emulated": "EMULATED"})
    base = table.loc[table["variant"] == "BF16", "mean"].item()
    shown = pd.DataFrame(
        {
            "training in": table["variant"].str.removesuffix(", emulated"),
            "kind": kind.to_numpy(),
            "validation loss (nats, mean ± sd)": [
                f"{m:.3f} ± {s:.3f}" for m, s in zip(table["mean"], table["std"], strict=True)
            ],
            "minus BF16": [f"{m - base:+.3f}" for m in table["mean"]],
        }
    )
    return markdown(shown, f"{caption}; {rows['seed'].nunique()} seeds each")


def emulation_table() -> str:
    rows, caption = results.recorded("emulation")
    products = rows[rows["tensor"].isin(("y", "dx", "dw"))]
    states = rows[~rows["tensor"].isin(("y", "dx", "dw"))]
    lines = []
    for recipe, of_recipe in products.groupby("recipe", sort=False):
        state = states.loc[states["recipe"] == recipe, "equal"]
        line = {
            "recipe": recipe,
            "scales and amax histories": f"{int(state.sum())} of {len(state)} identical" if len(state) else "none kept",
        }
        for sums, name in (("fp32", "FP32 sums"), ("tensor core", "tensor-core sums")):
            part = of_recipe[of_recipe["sums"] == sums]
            line[f"{name}: largest relative error"] = f"{part['relative_error'].max():.1e}"
            line[f"{name}: least share of identical elements"] = f"{part['identical'].min():.4f}"
        lines.append(line)
    return markdown(
        pd.DataFrame(lines),
        f"{caption}; the emulator on the same GPU, fresh random inputs, {len(products)} results compared",
    )


TABLES = {
    "runs": run_table,
    "training": training_table,
    "benchmark": benchmark_table,
    "text": text_table,
    "emulation": emulation_table,
}


def rendered(text: str) -> str:
    """`text` with every marked table made anew. Raises ValueError for a marker that names no table."""

    def fill(match: re.Match) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"README marks a table {match[2]!r} that is not known; there are {', '.join(TABLES)}")
        return match[1] + TABLES[match[2]]() + match[3]

    return MARKED.sub(fill, text)


def drifted() -> list[str]:
    """Names of the tables in README that differ from their results files."""
    text = README.read_text()
    return [
        old[2]
        for old, new in zip(MARKED.finditer(text), MARKED.finditer(rendered(text)), strict=True)
        if old[0] != new[0]
    ]


def render() -> None:
    temporary = README.with_name("README.md.tmp")
    temporary.write_text(rendered(README.read_text()))
    os.replace(temporary, README)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(f"report: {' '.join(sys.argv[1:])!r} is not known; use no argument, or --check")
    try:
        if not sys.argv[1:]:
            render()
        elif names := drifted():
            sys.exit(
                f"report: README's tables differ from results/: {', '.join(names)}. Run `python -m helpers.report`"
            )
    except ValueError as error:
        sys.exit(f"report: {error}")
