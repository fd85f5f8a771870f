"""A text that is on every machine: the modules of Python's standard library, as token ids.

A token is a frequent piece (a word, a line break with the indentation after it, a sign); what is
not frequent is spelled, character by character.
"""

import hashlib
import re
import string
import sysconfig
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

_PIECE = re.compile(r"\w+|\n *|\W")
_HELD_OUT = 10  # each tenth module is kept for the evaluation


class Rows(NamedTuple):
    """Rows `(rows, length + 1)` of token ids; no row holds text of two modules."""

    train: np.ndarray
    held_out: np.ndarray
    digest: str  # of the text: another Python has another


def rows(length: int, vocabulary: int) -> Rows:
    """The modules cut into rows, one token longer than `length`: each predicts its successor.

    Args:
        length: Tokens of a row.
        vocabulary: Number of ids; 0 is an unknown character.
    """
    modules = _modules()
    parts: tuple[list[str], list[str]] = [], []
    for number, text in enumerate(modules):
        parts[number % _HELD_OUT == _HELD_OUT - 1].append(text)
    ids = _ids_of_pieces(parts[0], vocabulary)
    train, held_out = (_cut(part, ids, length) for part in parts)
    return Rows(train, held_out, hashlib.sha256("".join(modules).encode()).hexdigest())


def _modules() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    return [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))]


def _ids_of_pieces(texts: list[str], vocabulary: int) -> dict[str, int]:
    """Ids from 1: every printable ASCII character, then the most frequent pieces."""
    counts = Counter(piece for text in texts for piece in _PIECE.findall(text))
    frequent = (piece for piece, _ in counts.most_common(vocabulary))
    pieces = list(dict.fromkeys([*string.printable, *frequent]))[: vocabulary - 1]
    return {piece: number for number, piece in enumerate(pieces, 1)}


def _cut(texts: list[str], ids: dict[str, int], length: int) -> np.ndarray:
    found = []
    for text in texts:
        tokens: list[int] = []
        for piece in _PIECE.findall(text):
            tokens += [ids[piece]] if piece in ids else [ids.get(char, 0) for char in piece]
        starts = range(0, len(tokens) - length, length)
        found += [tokens[start : start + length + 1] for start in starts]
    return np.array(found, "int32")
