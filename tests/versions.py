"""`make versions`: the laws and the retrofit on older versions of Keras, and on its main branch.

All come from the package index, the main branch as the newest nightly build, with KerasHub's.
Each stands alone in a folder, in front of the installed Keras. `python tests/versions.py nightly`
is the short form of every day, on the nightly build alone.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The last release of each minor version; the newest is what is installed.
RELEASES = "3.13.2", "3.14.1", "3.15.1"
NIGHTLY = "--pre", "keras-nightly", "keras-hub-nightly"  # (KerasHub reads private names of Keras)
# By file, then by test, the private names of `_keras.py` whose change it sees.
SEEN_BY = {
    "layers/test_parity": {
        "test_outputs_and_scores": "gate is_grouped projections scale sliding_window",
        "test_dropout_is_seeded_as_in_stock": "dropout_layer",
        "test_ours_and_stock_share_a_file": "file_weights_under",
    },
    "rules/test_autograph": {
        "test_autograph_rewrites_the_users_function_alone": "exempt_from_autograph"
    },
    "layers/test_layer": {
        "test_the_hook_takes_a_causal_flag_as_that_of_stock_does": "wants_scores want_scores",
        "test_one_tensor_feeds_two_layers_and_keeps_its_mask": "get_keras_mask set_keras_mask",
    },
    "retrofit/test_retrofit": {
        "test_a_rule_is_what_the_loops_say": (
            "_compute_attention COMPUTE_ATTENTION arguments_of argument_names "
            "layers_of file_under tensors_by_input GLOBAL_CUSTOM_NAMES"
        ),
        "test_a_subclass_that_computes_attention_itself_is_refused": (
            "has_own_softmax MASKED_SOFTMAX"
        ),
        "test_a_whole_mask_is_an_input_with_a_head_axis": "set_inputs",
    },
    "retrofit/test_frame": {
        "test_it_obeys_whenever_it_is_called": (
            "Functional functional_of unpickle_model saving_lib KerasSaveable"
        ),
        "test_a_head_is_fitted_and_exported": "_default_save_signature",
        "test_a_model_inside_obeys_alone_if_it_gets_the_same_inputs": "taken_by_inputs",
        "test_what_is_built_from_layers_inside_is_refused": "CLONES",
        "test_inputs_that_only_rules_read_come_and_go": "file_as REGISTERED_OBJS_TO_NAMES",
        "test_whole_models_in_hdf5_are_refused": "in_hdf5 global_state",
    },
    "retrofit/test_find": {
        "test_attention_that_runs_on_two_sequences_takes_no_ids_of_one": "calls_of",
        "test_a_residual_sum_goes_on_with_one_sequence": "made_by",
    },
    "retrofit/test_functions": {
        "test_a_function_of_old_in_a_subclassed_model_is_found_among_attributes": (
            "scopes_in_traces without_number"
        ),
    },
    "retrofit/test_hidden_attention": {
        "test_what_may_attend_is_refused_until_it_is_named": "nodes",
        "test_the_graph_inside_a_sequential_model_is_not_taken_for_hidden": "sublayers",
    },
    "retrofit/test_tasks": {
        "test_a_copy_of_a_task_is_not_compiled": "uncompile",
    },
    "retrofit/test_subclassed": {
        "test_a_model_that_keras_cannot_build_is_not_loaded_in_part": "has_query_in_file",
    },
    "retrofit/test_masked_model": {
        "test_a_copy_has_vocabularies": "layers_in_file",
        "test_rematerialised_layers_find_the_rule_again": ("remat_mode copy_modes"),
    },
    "attention/test_derivatives": {
        "test_a_map_refuses_tiles": "in_vectorized_map",
        "test_what_was_traced_under_checks_serves_nobody_else": "checks_numerics",
    },
    "export/test_export_refused": {
        "test_a_graph_that_no_server_runs_is_refused": "XLA_MUST_COMPILE",
    },
    "export/test_export": {
        "test_the_export_of_keras_obeys_and_holds_each_loop_once": "NOT_INLINED run_in_scopes",
    },
}
SMOKE = ["tests/test_keras_internals.py", "tests/test_golden.py"]
SMOKE += ["tests/retrofit/test_retrofit.py::test_a_rule_is_what_the_loops_say"]
# What fails first explains what fails after it.
PARITY = ["tests/test_keras_internals.py"]
PARITY += [f"tests/{file}.py::{test}" for file, tests in SEEN_BY.items() for test in tests]
PARITY += [f"tests/retrofit/test_{name}.py" for name in ("retrofit", "masked_model")]
PARITY += ["tests/layers/test_parity.py", "tests/test_golden.py"]
LAWS = [*PARITY, "tests/test_readme.py::test_snippets", "tests/rules", "tests/layers"]
LAWS += ["tests/attention/test_laws.py", "tests/attention/test_attention.py"]
LAWS += ["tests/retrofit/test_families.py"]
PASSES = {"tensorflow": LAWS, "jax": PARITY, "torch": PARITY}
FIND = "import importlib.util; found = importlib.util.find_spec('keras').origin"
RUN_KERAS = """
import keras
x = keras.Input((3,))
keras.Model(x, keras.layers.Dense(2)(x))(keras.ops.ones((1, 3)))
"""


def main(only=""):
    packages = {f"Keras {release}": [f"keras=={release}"] for release in RELEASES}
    packages, passes = packages | {"Keras' main branch": NIGHTLY}, PASSES
    if only == "nightly":
        packages, passes = {"Keras' main branch": NIGHTLY}, dict.fromkeys(PASSES, SMOKE)
    report = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, what in packages.items():
            folder = Path(scratch, name.replace(" ", "_"))
            pip = sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"
            subprocess.run([*pip, "--target", str(folder), *what], check=True)
            for backend, files in passes.items():
                print(f"\n=== {name}, {backend}", flush=True)
                report.append((name, backend, run(folder, backend, files)))
    for name, backend, code in report:
        how = {None: "not run: Keras itself fails there", 0: "passed"}
        print(f"{name:24} {backend:12} {how.get(code, f'FAILED ({code})')}")
    return int(any(code for *_, code in report))


def run(folder, backend, files):
    """The exit code with the Keras in `folder`, or `None` where this Keras itself fails."""
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"KERAS_BACKEND": backend, "PYTHONPATH": paths}
    where = f"{FIND}; assert found.startswith({str(folder)!r}), found"
    subprocess.run([sys.executable, "-c", where], env=environment, check=True)
    if subprocess.run([sys.executable, "-c", RUN_KERAS], env=environment).returncode:
        return None
    command = sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *files
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
