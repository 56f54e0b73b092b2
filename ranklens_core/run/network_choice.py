"""The network that was chosen from Hydra's group ``network``, as ``--network`` wants it: a name or a file."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ranklens_core.configs_dir import configs_dir
from ranklens_core.errors import UsageError
from ranklens_core.timing.network import load_network
from ranklens_core.timing.typed_yaml import read_mapping


@dataclass(frozen=True)
class NetworkChoice:
    """``name`` of the group's file, the ``file`` itself where it was found, and the composed ``values``,
    which overrides may have changed."""

    name: str
    file: Path | None
    values: Mapping[str, Any]

    @classmethod
    def of(cls, network: DictConfig | None, runtime: Any) -> NetworkChoice | None:
        """From a composed configuration and its ``hydra.runtime``; None where no network was chosen."""
        if network is None:
            return None
        name = str(runtime.choices["network"])
        folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
        files = [folder / "network" / f"{name}.yaml" for folder in folders]
        values = OmegaConf.to_container(network, resolve=True)
        assert isinstance(values, dict)
        found = next((file for file in files if file.is_file()), None)
        return cls(name, found, {str(key): value for key, value in values.items()})

    @property
    def is_changed(self) -> bool:
        """Whether overrides made it another network than its file describes."""
        return self.file is None or read_mapping(self.file) != self.values

    def option(self, directory: Path) -> str:
        """What follows ``--network``; a changed network is written to ``directory``."""
        if self.file is None or self.is_changed:
            written = directory / "network.yaml"
            OmegaConf.save(OmegaConf.create(self._movable()), written)
            return str(written)
        return self.name if self.file.parent.parent == configs_dir() else str(self.file)

    def check(self) -> None:
        """Raise UsageError, naming the key, for a network that cannot be used."""
        with tempfile.TemporaryDirectory() as directory:
            option = self.option(Path(directory))
            try:
                load_network(option)
            except UsageError as error:
                raise UsageError(str(error).replace(option, f"network={self.name}")) from error

    def _movable(self) -> dict[str, Any]:
        """The values, with paths that are read from elsewhere too."""
        values = dict(self.values)
        if self.file is not None and isinstance(values.get("nccl_tests_logs"), list):
            folder = self.file.parent
            values["nccl_tests_logs"] = [
                {**log, "path": str(folder / str(log.get("path", "")))} for log in values["nccl_tests_logs"]
            ]
        return values
