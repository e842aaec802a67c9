"""Import Megatron-Bridge without every model family in it.

`import megatron.bridge` executes the __init__ files of some 45 model families, most of them of no use to the run at
hand. install() puts a finder in front of the import system: a megatron.bridge package whose __init__ does nothing but
import names is entered without executing it, and each name is imported when somebody asks for it. Executed on import,
one such file registers its model with AutoBridge, so load_family() imports the modules that name the architecture.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

ROOT = "megatron.bridge"
# megatron.training: Bridge needs its config classes; its __init__ imports a whole second training loop.
LAZY = (ROOT, "megatron.training", "megatron.core.inference")


def install() -> None:
    """Enter megatron.bridge's packages lazily from now on. Call before the first import of it."""
    assert ROOT not in sys.modules, f"{ROOT} was imported before trainer.lazy_bridge.install()"
    sys.meta_path.insert(0, _Finder())


def load_family(architecture: str) -> None:
    """Import the modules that register `architecture` (the first of config.json's architectures) with AutoBridge."""
    models = Path(importlib.util.find_spec(f"{ROOT}.models").submodule_search_locations[0])
    for file in sorted(models.rglob("*_bridge.py")):
        text = file.read_text()
        if (
            "register_bridge" in text
            and architecture in text
            and file.name not in ("model_bridge.py", "auto_bridge.py")
        ):
            importlib.import_module(".".join((ROOT, "models", *file.relative_to(models).with_suffix("").parts)))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if not f"{fullname}.".startswith(tuple(f"{package}." for package in LAZY)):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.submodule_search_locations is None or not spec.origin:
            return spec
        names = _reexported(Path(spec.origin).read_text(), fullname)
        if names is not None:
            spec.loader = _Loader(names)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, names: dict[str, tuple[str, str]]):
        self.names = names

    def exec_module(self, module) -> None:
        names, package = self.names, module.__name__

        def __getattr__(name: str):
            if name not in names:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            source, attribute = names[name]
            found = importlib.import_module(source)
            value = getattr(found, attribute) if attribute else found
            setattr(module, name, value)
            return value

        module.__getattr__ = __getattr__
        module.__all__ = list(names)


def _reexported(source: str, package: str) -> dict[str, tuple[str, str]] | None:
    """Name -> (module, attribute) of an __init__ that only imports; None for one that does anything else."""
    names = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})
        elif isinstance(node, ast.Import):
            continue  # for what it registers: load_family() does that for the one family that is needed
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            continue
        elif isinstance(node, ast.Assign) and getattr(node.value, "id", "") in names:
            names[node.targets[0].id] = names[node.value.id]
        elif isinstance(node, ast.Expr) and ast.unparse(node).startswith(("'", '"', "warnings.warn(")):
            continue
        else:
            return None
    return names
