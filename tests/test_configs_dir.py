"""The shipped configuration files are found in a checkout and in an installation."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranklens_core import configs_dir as module
from ranklens_core.configs_dir import configs_dir
from ranklens_core.errors import UsageError


def package_in(tmp_path: Path, *directories: str) -> Path:
    for name in ("ranklens_core", *directories):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    return tmp_path / "ranklens_core"


def test_this_checkout_has_them() -> None:
    assert configs_dir().is_absolute()
    assert list((configs_dir() / "network").glob("*.yaml"))


def test_installed(tmp_path: Path) -> None:
    package = package_in(tmp_path, "ranklens_core/_configs")
    assert module._find(package) == package / "_configs"


def test_checkout(tmp_path: Path) -> None:
    package = package_in(tmp_path, "configs")
    (tmp_path / "pyproject.toml").touch()
    assert module._find(package) == tmp_path / "configs"


def test_somebody_elses_configs_in_site_packages_are_not_ours(tmp_path: Path) -> None:
    package = package_in(tmp_path, "configs")
    with pytest.raises(UsageError, match="install ranklens again"):
        module._find(package)
