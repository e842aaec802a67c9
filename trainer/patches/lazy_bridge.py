"""Import Megatron-Bridge without parts that the current run does not use: other model families, other kinds of data.

`import megatron.bridge` executes the __init__ files of about 45 model families, most of which the run does not use.
install() adds a finder to the import system. For a package below LAZY whose __init__ only imports names, the finder
skips execution, and each name is imported when it is first read. An executed __init__ would also register its models
with AutoBridge; instead load_family() imports the modules that name the architecture.

promised() is for single names that are imported unconditionally and then not used. The importer gets a class instead,
and the real module is imported when the class is called.

Remove when the packages below LAZY import their families on demand, as transformers does:
https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/models/__init__.py
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from trainer.patches import versions

ROOT = "megatron.bridge"
# megatron.training: Bridge needs its config classes; its __init__ imports a whole second training loop.
# megatron.core.inference: the layers import one of its base classes; its __init__ files import the server.
LAZY = (ROOT, "megatron.training", "megatron.core.inference")


def install() -> None:
    """Import the packages below LAZY lazily from now on. Call before the first import of megatron.bridge."""
    versions.check(__name__)
    assert ROOT not in sys.modules, f"{ROOT} was imported before trainer.patches.lazy_bridge.install()"
    sys.meta_path.insert(0, _Finder())


def load_family(architecture: str) -> None:
    """Import the modules that register `architecture` (the first of config.json's architectures) with AutoBridge."""
    spec = importlib.util.find_spec(f"{ROOT}.models")
    assert spec and spec.submodule_search_locations
    models = Path(spec.submodule_search_locations[0])
    for file in sorted(models.rglob("*_bridge.py")):
        text = file.read_text()
        registers = "register_bridge" in text and file.name not in ("model_bridge.py", "auto_bridge.py")
        if registers and architecture in text:
            importlib.import_module(".".join((ROOT, "models", *file.relative_to(models).with_suffix("").parts)))


@contextlib.contextmanager
def promised(modules: Mapping[str, Sequence[str] | dict[str, object]]):
    """Make `from module import name` return a promise, or the value given for the name, while the block runs.

    Later imports find the real modules. Reading another name of one of these modules also imports the real one.
    """
    absent = [module for module in modules if module not in sys.modules]
    for module in absent:
        values = modules[module]
        if not isinstance(values, dict):
            values = {name: _Promise(name, (), {"__module__": module}) for name in values}
        sys.modules[module] = Promised(module, values)
    try:
        yield
    finally:
        for module in absent:
            if isinstance(sys.modules.get(module), Promised):
                del sys.modules[module]


class Promised(ModuleType):
    """Placeholder module in sys.modules. Reading a name outside `values` imports the real module."""

    def __init__(self, name: str, values: dict):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__dict__.update(values)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # `from module import` reads __path__, inspect reads __file__
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _Promise(type):
    """Metaclass of promises. They are classes because some importers use them in unions of types or isinstance()."""

    def __call__(cls, *args, **kwargs):
        return getattr(_real(cls.__module__), cls.__name__)(*args, **kwargs)

    def __instancecheck__(cls, instance) -> bool:
        module = sys.modules.get(cls.__module__)
        if module is None or isinstance(module, Promised):
            return False  # no instance exists yet
        return isinstance(instance, getattr(module, cls.__name__))


def _real(module: str) -> ModuleType:
    if isinstance(sys.modules.get(module), Promised):
        del sys.modules[module]
    return importlib.import_module(module)


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
            imported = importlib.import_module(source)
            value = getattr(imported, attribute) if attribute else imported
            setattr(module, name, value)
            return value

        module.__getattr__ = __getattr__
        module.__all__ = list(names)


def _reexported(source: str, package: str) -> dict[str, tuple[str, str]] | None:
    """Return name -> (module, attribute) for an __init__ that only imports; None for any other."""
    names = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})
        elif isinstance(node, ast.Import):
            continue  # only registers models; load_family() does that for the needed family
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            continue
        elif isinstance(node, ast.Assign) and getattr(node.value, "id", "") in names:
            names[node.targets[0].id] = names[node.value.id]  # an alias of a class
        elif isinstance(node, ast.Expr) and ast.unparse(node).startswith(("'", '"', "warnings.warn(")):
            continue
        else:
            return None
    return names
