"""`ropewalk doctor`: show versions and kernels."""

from __future__ import annotations

import importlib
import json
import platform
from importlib import metadata

import click

import ropewalk


@click.command(short_help="Show versions and usable kernels.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def doctor(as_json: bool) -> None:
    """Show the installed versions, and which kernels are usable or why they are not."""
    facts = {
        "ropewalk": ropewalk.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{package: _version(package) for package in ("torch", "numpy", "triton", "matplotlib")},
        **_backends(),
    }
    click.echo(
        json.dumps(facts, indent=2) if as_json else "\n".join(f"{name:<10}  {fact}" for name, fact in facts.items())
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _backends() -> dict[str, str]:
    """Return the state of each backend: usable, or the reason why it is not."""
    try:
        importlib.import_module("torch")
        return ropewalk.backends()
    except (ImportError, OSError) as e:
        return {"reference": f"not usable: torch cannot be imported ({e})"}
