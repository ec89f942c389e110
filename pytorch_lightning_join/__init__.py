"""`lightning_join` for `pytorch_lightning`: `Trainer(strategy="ddp_join")` of the older name.

`lightning.pytorch` and `pytorch_lightning` are the same code twice, and their classes do not know each other. So this
package is `lightning_join` once more: its modules are read from there, with each of these names in place of the other.
A traceback shows `lightning_join`'s lines. Importing both packages is fine; type checkers see `Any`.
"""

import pathlib
import re
import sys
import types
import typing
from importlib import machinery

_TWINS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric", __name__: "lightning_join"}
_OTHER = {**_TWINS, **{theirs: ours for ours, theirs in _TWINS.items()}}
_NAMES = re.compile(r"\b({})\b".format("|".join(sorted(map(re.escape, _OTHER), key=len, reverse=True))))

__path__ = [str(pathlib.Path(__file__).parents[1] / "lightning_join")]


class _Reader(machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        """Compile a source of `lightning_join` for this package; what Python keeps of it compiled is for that one."""
        source = _NAMES.sub(lambda name: _OTHER[name[0]], pathlib.Path(self.path).read_text(encoding="utf-8"))
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: typing.Any = None, target: typing.Any = None) -> machinery.ModuleSpec | None:
        """Find a module of this package where `lightning_join`'s are."""
        spec = machinery.PathFinder.find_spec(name, path, target) if name.startswith(f"{__name__}.") else None
        if spec is not None and spec.origin is not None:
            spec.loader, spec.cached = _Reader(name, spec.origin), None
        return spec


if typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any: ...

else:
    sys.meta_path.insert(0, _Finder)
    exec(_Reader(__name__, f"{__path__[0]}/__init__.py").get_code(__name__))
