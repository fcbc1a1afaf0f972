"""`ropewalk doctor`: show versions and kernels."""

from __future__ import annotations

import importlib
import platform
from importlib import metadata

import click

import ropewalk


@click.command(short_help="Show versions and usable kernels.")
def doctor() -> None:
    """Show the installed versions, and which kernels are usable or why they are not."""
    click.echo(f"ropewalk    {ropewalk.__version__}")
    click.echo(f"python      {platform.python_version()} on {platform.platform()}")
    for package in ("torch", "numpy", "triton", "matplotlib"):
        click.echo(f"{package:<10}  {_version(package)}")
    for backend, state in _backends().items():
        click.echo(f"{backend:<10}  {state}")


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
