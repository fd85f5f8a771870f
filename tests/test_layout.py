"""The arrows between the modules, read from their imports."""

import ast
from pathlib import Path

import pytest

import keras_headmask as hm

PACKAGE = Path(hm.__file__).parent
# No framework at import time; only what reckons with tiles needs NumPy.
LIGHT = {
    "config",
    "describing",
    "specs",
    "position_leaves",
    "input_leaves",
    "per_head",
    "recipes",
    "coverage",
    "json_schema",
}
NEED_NUMPY = {"position_leaves", "coverage"}

ARROWS = {
    "config": set(),
    "describing": {"config"},
    "specs": {"config", "describing"},
    "position_leaves": {"config", "specs"},
    "input_leaves": {"config", "specs"},
    "per_head": {"config", "position_leaves", "specs"},
    "recipes": {"config", "input_leaves", "position_leaves", "specs"},
    "json_schema": {"config"},
    "masks": set(),
    "finite": set(),
    "evaluation": {"config", "masks", "per_head", "position_leaves", "specs"},
    "coverage": {"specs"},
    "tiled_python": {"coverage", "evaluation", "finite", "specs", "tiled_dropout"},
    "tile_ranges": {"coverage", "evaluation", "input_leaves", "specs", "tiled_python"},
    "tiled_dropout": {"evaluation"},
    "graph_sharing": {"evaluation", "tiled_python"},
    "tiled_tensorflow": {
        "evaluation",
        "finite",
        "graph_sharing",
        "position_leaves",
        "specs",
        "tile_ranges",
        "tiled_python",
    },
    "head_by_head": {
        "evaluation",
        "graph_sharing",
        "per_head",
        "position_leaves",
        "specs",
        "tiled_python",
        "tiled_tensorflow",
    },
    "tiling": {
        "evaluation",
        "finite",
        "head_by_head",
        "input_leaves",
        "per_head",
        "position_leaves",
        "specs",
        "tiled_dropout",
        "tiled_python",
        "tiled_tensorflow",
    },
    "attention": {"evaluation", "finite", "input_leaves", "masks", "specs", "tiling"},
    "looking": set(),
    "layer": {
        "attention",
        "config",
        "evaluation",
        "looking",
        "masks",
        "per_head",
        "position_leaves",
        "specs",
        "tiling",
    },
    "tracing": {"looking"},
    "reachable": set(),
    "selectors": {"reachable", "specs", "tracing"},
    "layer_rules": {"per_head", "position_leaves", "selectors", "specs"},
    "binding": {
        "attention",
        "evaluation",
        "layer",
        "layer_rules",
        "looking",
        "masks",
        "position_leaves",
        "tiling",
    },
    "hooks": {"binding", "layer", "layer_rules", "looking", "specs"},
    "consumed": {"looking"},
    "compiled": set(),
    "stock": {"consumed", "looking", "reachable"},
    "masked_model": {
        "binding",
        "compiled",
        "hooks",
        "layer",
        "layer_rules",
        "masks",
        "selectors",
        "specs",
        "stock",
    },
    "retrofit": {
        "binding",
        "compiled",
        "config",
        "consumed",
        "hooks",
        "layer_rules",
        "masked_model",
        "per_head",
        "selectors",
        "specs",
        "tracing",
    },
    "panels": {"config", "coverage", "describing", "evaluation", "per_head", "specs"},
    "drawing": {"panels", "specs"},
    "figures": {"coverage", "panels"},
    "observing": {
        "evaluation",
        "hooks",
        "looking",
        "masks",
        "position_leaves",
        "selectors",
        "specs",
    },
    "plotting": {"coverage", "describing", "figures", "observing", "panels", "per_head", "specs"},
    "notebook": {"describing", "drawing", "figures", "masked_model", "panels", "specs"},
    "lint_model": {
        "lint_subject",
        "masked_model",
        "masks",
        "observing",
        "position_mixing",
        "selectors",
        "specs",
    },
    "lint_subject": {
        "config",
        "describing",
        "evaluation",
        "masks",
        "per_head",
        "position_leaves",
        "specs",
    },
    "findings": {"describing", "terminal"},
    "lint_rule": {
        "describing",
        "findings",
        "lint_subject",
        "position_leaves",
        "specs",
        "tiled_python",
    },
    "lint_inputs": {"findings", "lint_subject", "specs"},
    "linting": {
        "findings",
        "lint_inputs",
        "lint_model",
        "lint_rule",
        "lint_subject",
        "position_mixing",
        "specs",
    },
    "saved_versions": set(),
    "serving": {"saved_versions", "warmup"},
    "predict_requests": set(),
    "tensorflow_errors": set(),
    "served_versions": {"predict_requests", "saved_versions", "tensorflow_errors"},
    "http_limits": set(),
    "kserve_app": {"predict_requests"},
    "server": {"http_limits", "kserve_app", "served_versions", "serving", "terminal"},
    "versions": set(),
    "fresh_process": set(),
    "graph_scan": {"fresh_process"},
    "precision": set(),
    "interventions": {
        "evaluation",
        "hooks",
        "layer",
        "looking",
        "masks",
        "observing",
        "per_head",
        "position_leaves",
        "selectors",
        "specs",
    },
    "position_mixing": {"selectors"},
    "signatures": {"interventions", "selectors"},
    "samples": {"input_leaves", "signatures", "specs"},
    "warmup": set(),
    "export_check": {
        "fresh_process",
        "interventions",
        "looking",
        "position_mixing",
        "samples",
        "selectors",
        "signatures",
    },
    "padding_trial": {
        "export_check",
        "fresh_process",
        "interventions",
        "samples",
        "signatures",
        "specs",
    },
    "export_plan": {
        "export_check",
        "fresh_process",
        "interventions",
        "padding_trial",
        "position_mixing",
        "precision",
        "samples",
        "signatures",
        "tiled_python",
        "warmup",
    },
    "export_report": {"export_check", "terminal"},
    "export": {
        "export_check",
        "export_plan",
        "export_report",
        "graph_scan",
        "interventions",
        "precision",
        "selectors",
        "serving",
        "signatures",
        "versions",
        "warmup",
    },
    "starting": set(),
    "terminal": set(),
    "command_input": {"specs", "starting"},
    "model_info": {"describing", "interventions", "selectors", "specs", "terminal"},
    "beside_stock": {
        "describing",
        "evaluation",
        "layer",
        "samples",
        "signatures",
        "specs",
        "terminal",
    },
    "command_frame": {"specs", "tensorflow_errors", "terminal"},
    "rule_commands": {
        "beside_stock",
        "command_frame",
        "command_input",
        "drawing",
        "json_schema",
        "linting",
        "model_info",
        "panels",
        "plotting",
        "retrofit",
        "specs",
        "starting",
        "terminal",
        "findings",
    },
    "model_commands": {
        "attention",
        "command_frame",
        "command_input",
        "export",
        "model_info",
        "retrofit",
        "server",
        "starting",
        "terminal",
        "warmup",
    },
    "command_line": {"command_frame", "model_commands", "rule_commands", "terminal"},
    "__main__": {"command_line"},
}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imported(nodes):
    """Dotted names that import statements among `nodes` name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import_time(node):
    """Every node that runs when the module is imported: all but the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_import_time(child)


def tree(module):
    return ast.parse((PACKAGE / f"{module}.py").read_text())


@pytest.mark.parametrize("module", MODULES)
def test_arrows(module):
    assert module in ARROWS, f"say in this test what {module} may import"
    names = set(imported(ast.walk(tree(module))))
    ours = {name.split(".")[1] for name in names if name.startswith("keras_headmask.")}
    assert ours <= ARROWS[module]
    if "keras_headmask" in names:  # `from keras_headmask import config` names a module, not a value
        assert ours <= set(MODULES)


def test_arrows_run_one_way():
    """Each module can be put after all that it imports."""
    placed, waiting = set(), dict(ARROWS)
    while waiting:
        ready = {module for module, needs in waiting.items() if needs <= placed}
        assert ready, f"a circle among {sorted(waiting)}"
        placed |= ready
        waiting = {m: needs for m, needs in waiting.items() if m not in ready}


@pytest.mark.parametrize("module", sorted(LIGHT))
def test_the_language_needs_no_framework_at_import_time(module):
    roots = {name.split(".")[0] for name in imported(at_import_time(tree(module)))}
    assert not roots & {"keras", "tensorflow", "jax", "torch"}
    assert "numpy" not in roots or module in NEED_NUMPY
    assert ARROWS[module] <= LIGHT


def test_only_tiling_inside_a_function_imports_tensorflow_code():
    """So that the package can be imported where there is another backend."""
    of_tensorflow = {"graph_sharing", "head_by_head", "tiled_tensorflow", "tile_ranges"}
    for module in set(MODULES) - of_tensorflow:
        names = set(imported(at_import_time(tree(module))))
        roots = {name.split(".")[0] for name in names}
        assert not roots & {"tensorflow", "jax", "torch"}, module
        assert not names & {f"keras_headmask.{m}" for m in of_tensorflow}, module


def test_only_figures_imports_matplotlib_and_nothing_imports_figures_at_once():
    """So that the package can be imported without it."""
    for module in MODULES:
        names = set(imported(at_import_time(tree(module))))
        assert "keras_headmask.figures" not in names, module
        if module != "figures":
            names = set(imported(ast.walk(tree(module))))
            assert "pyplot" not in " ".join(names), module
            of_types = {"matplotlib.figure", "matplotlib.figure.Figure"}  # under TYPE_CHECKING
            assert {name for name in names if name.startswith("matplotlib")} <= of_types, module
    assert not any("pyplot" in name for name in imported(ast.walk(tree("figures"))))


def test_no_module_is_named_like_a_public_function():
    assert set(MODULES) & set(hm.__all__) <= {"recipes"}  # which is the module itself
    assert hm.recipes.__name__ == "keras_headmask.recipes"


def test_public_names_exist_once_each_and_sorted():
    assert hm.__all__ == sorted(set(hm.__all__))
    assert all(hasattr(hm, name) for name in hm.__all__)
