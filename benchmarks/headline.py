"""The README's table: some rows of `docs/benchmarks/quality.md`, put between its two marks.

<!-- quality -->
...
<!-- end of quality -->
"""

from collections.abc import Sequence
from pathlib import Path

from shardplan.common.tables import markdown_table

README = Path(__file__).resolve().parent.parent / "README.md"
START, END = "<!-- quality -->", "<!-- end of quality -->"
TITLES = {
    "gpt": "GPT, 2 layers, float32",
    "llama": "Llama 3 8B, 2 of its layers, bfloat16",
    "moe": "Mixtral 8x7B, 2 of its layers, bfloat16",
    "vit": "Vision transformer",
    "resnet": "ResNet-50, 256 images of 224 x 224",
    "vgg": "VGG-16, 256 images of 224 x 224",
    "dlrm": "DLRM, 24 billion parameters in tables",
    "mamba": "Mamba, 2 layers",
}
MESHES = {"8": "(8,)", "2x4": "(2, 4)"}
HEADER = ("training step", "mesh", "shardplan", "best by hand", "which", "predicted", "above the optimum")


def write(rows: Sequence[Sequence[str]]) -> None:
    """Puts the rows without a memory limit of the models with titles into the README.

    `rows` are cells as `benchmarks.quality` makes them: model, mesh, limit, predicted, compiled, gap, by hand, which.
    """
    found = {(row[0], row[1]): row for row in rows if row[2] == "none" and row[4]}
    lines = []
    for model, title in TITLES.items():
        for mesh, shown in MESHES.items():
            if (model, mesh) in found:
                _, _, _, predicted, compiled, gap, by_hand, which, *_ = found[model, mesh]
                first = title if mesh == next(iter(MESHES)) else ""
                lines.append((first, shown, f"**{compiled} MB**", f"{by_hand} MB", which, f"{predicted} MB", gap))
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(START)
    _, after = rest.split(END)
    README.write_text(f"{before}{START}\n\n{markdown_table(HEADER, lines)}\n\n{END}{after}", encoding="utf-8")
