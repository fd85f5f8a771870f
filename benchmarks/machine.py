"""Where and with what a record was made."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_LIMITS = "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"
_PACKAGES = ("keras", "tensorflow", "torch", "jax", "numpy")


def describe(module: str = "benchmarks", quick: bool = False) -> dict[str, Any]:
    """How a record begins: processor, cores, memory, versions, the date, and the command.

    Nothing names a user or a folder. `onednn` is what TensorFlow reads, where it is set.
    """
    return {
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
        "quick": quick,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "memory_gib": _memory_gib(),
            "system": f"{platform.system()} {platform.machine()}",
            "accelerator": _accelerator(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS"),
    }


def write(file: Path, record: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=2) + "\n")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    """Its name, and to what oneDNN and PyTorch are limited, as on a CPU that has nothing newer."""
    limits = {os.environ.get(name, "").upper() for name in _LIMITS} - {""}
    limited = f" (used as one with {', '.join(sorted(limits))})" if limits else ""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith("model name")]
        return lines[0].split(":", 1)[1].strip() + limited
    except (OSError, IndexError):
        return (platform.processor() or "unknown") + limited


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        return None


def _accelerator() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
