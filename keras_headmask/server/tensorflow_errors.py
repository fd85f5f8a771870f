"""What went wrong, of what TensorFlow says."""

import re

# Of TensorFlow's messages: lines about where in the graph, and names of nodes within other lines.
_INTERNAL = re.compile(
    r"^(Graph execution error:|Detected at node|<stack traces|\s*File \"|\d+ root error).*"
    r"|^(Exception encountered when calling|Arguments received by|\s*•).*"
    r"|^\s*\(\d+\) [A-Z_]+:|\[\[?\{\{.*|\{\{[^}]*\}\}|\[Op:\w+\].*"
)
_BOLD = re.compile(r"\x1b\[[0-9;]*m")  # as Keras writes it around what TensorFlow says


def reason(message: str) -> str:
    """The line of TensorFlow's message that says what is wrong, without places in the graph."""
    plain = _BOLD.sub("", message)
    lines = (_INTERNAL.sub("", line).strip() for line in plain.splitlines())
    return next((line for line in lines if line), "it gives no reason")
