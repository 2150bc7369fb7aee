"""Hatchling's build hook: C helpers and CPU operators into the wheel, or, for an editable install, the checkout."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = Path(__file__).with_name("scripts") / "build_native.py"


def _builder() -> Any:
    spec = importlib.util.spec_from_file_location("baton_build_native", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class NativeBuildHook(BuildHookInterface[Any]):
    """Builds what is compiled. Without a compiler it asks for one from the package index."""

    def dependencies(self) -> list[str]:
        """Return what building needs beside hatchling."""
        return [] if _builder().compilers() else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and name the wheel after the platform: its libraries run with any Python 3."""
        builder = _builder()
        libraries = builder.libraries("best" if version == "editable" else "all")
        builder.build(libraries)
        if version == "editable":
            return
        for model in sorted(SCRIPT.parents[1].glob("models/*/config.json")):
            build_data["force_include"][str(model.parent)] = f"baton/_models/{model.parent.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"] += [f"/{library.target.relative_to(self.root).as_posix()}" for library in libraries]
