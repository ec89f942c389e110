"""Hold how the sources are laid out: `python scripts/structure.py [ROOT]` prints one line for each violation.

Imports are counted wherever they stand: under `TYPE_CHECKING`, in functions, by string. The tables come first; below
them are what is read of a file (`Module`), and the rules, each a function that yields violations.
"""

import ast
import builtins
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

OFFERED = ("torch_join", "torch_join.integration")
# Each package, and what it may import of the others.
PACKAGES: dict[str, tuple[str, ...]] = {
    "torch_join": (),
    "lightning_join": OFFERED,
    "pytorch_lightning_join": ("lightning_join",),  # whose source it reads
    "accelerate_join": OFFERED,
}
# The folders of each package, and what each may import of it; an empty table allows everything.
WINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "torch_join": {
        "_base": (),
        "_control": ("_base",),
        "_schedule": ("_base", "_control"),
        "_shadow": ("_base", "_control"),
        "_collectives": ("_base", "_control", "_shadow"),
        "_handover": ("_base", "_control", "_shadow", "_collectives"),
        "joinables": ("_base", "_control", "_shadow", "_collectives", "_handover"),
        "_tail": ("_base", "_control", "_schedule", "_shadow", "_collectives", "_handover", "joinables"),
        "_lockstep": ("_base", "_control", "_schedule", "_shadow", "_collectives", "_handover", "joinables", "_tail"),
    },
    "lightning_join": {
        "_compat": (),
        "_packages": (),
        "_names": (),
        "_collectives": (),
        "_protocol": ("_compat",),
        "_supported": ("_compat",),
        "_reading": ("_compat",),
        "_logging": ("_compat", "_protocol"),
        "_training": ("_compat", "_protocol"),
        "_loops": ("_compat", "_protocol", "_reading", "_logging", "_training"),
        "_fabric": ("_collectives", "_reading"),
        "_monitor": ("_compat", "_packages", "_joining", "_callback"),
    },
    "pytorch_lightning_join": {},
    "accelerate_join": {  # `_context` knows the others, and none knows it
        "_compat": (),
        "_prepared": ("_compat",),
        "_loaders": ("_compat", "_prepared"),
        "_active": ("_compat",),
        "_operations": ("_active", "_compat", "_prepared"),
        "_accelerator": ("_compat", "_loaders", "_operations"),
        "transformers": ("_active", "_compat", "_loaders", "_prepared"),
    },
}
# The files beside these folders, which may import all of them.
FACE = {
    "torch_join": ("__init__", "integration", "join", "own_loops"),
    "lightning_join": ("__init__", "_callback", "_joining", "_sharded", "_strategy", "fabric"),
    "pytorch_lightning_join": ("__init__",),
    "accelerate_join": ("__init__", "_context"),
}
FLOORS, FILES, TEST_FILES, CLASSES = 14, 14, 20, 2
LINES = 700  # of a file that is one class; most have less than 500
GETATTR: dict[str, str] = {  # "file: class", and why it needs a `__getattr__`
    "lightning_join/_fabric/joins.py: JoinedLoader": "it stands for whatever loader was set up",
    "accelerate_join/transformers/_loader.py: EvenedLoader": "it stands for this rank's own loader",
    "torch_join/_tail/reader.py: Windows": "frameworks look at it for the sampler of the loader that it is around",
}
# Private names of Lightning and torchmetrics that integrations use, and that torch_join has too.
THEIRS = {"_computed", "_iterator", "_timeout", "_update_count"}


class Class(NamedTuple):
    """A class of ours, and its bases: where they are of another file, by their names."""

    node: ast.ClassDef
    bases: "list[str | Class]"


class Module:
    """A file of ours: what it binds names to, and whatever modules it names."""

    def __init__(self, root: Path, path: Path) -> None:
        self.where = path.relative_to(root).as_posix()
        parts = path.relative_to(root).with_suffix("").parts
        self.package = ".".join(parts[:-1])
        self.name = self.package if parts[-1] == "__init__" else ".".join(parts)
        self.top, self.wing = parts[:2]  # `wing`: a folder, or a file beside the folders
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.bound: dict[str, str | Class] = {}
        self.named: list[tuple[int, str, bool]] = []  # line, `torch_join._tail.server.Server`, whether in a string
        self.unknown: list[int] = []  # lines that import a module whose name is not written there
        self.classes: list[Class] = []
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt | ast.expr)]
        skipped = ((ast.Attribute, ast.Attribute), (ast.Expr, ast.Constant))  # `a.b` of `a.b.c`; docstrings
        inner = {id(value) for node in nodes if (type(node), type(value := getattr(node, "value", None))) in skipped}
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            if id(node) not in inner:
                self._read(node)

    def _read(self, node: ast.stmt | ast.expr) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    self.named.append((node.lineno, alias.name, False))
                    first = alias.name.partition(".")[0]
                    self.bound[alias.asname or first] = alias.name if alias.asname else first
            case ast.ImportFrom(module=module, names=names, level=level):
                origin = resolve_name("." * level + (module or ""), self.package)
                for alias in names:
                    self.named.append((node.lineno, f"{origin}.{alias.name}", False))
                    self.bound[alias.asname or alias.name] = f"{origin}.{alias.name}"
            case ast.Call(func=func, args=arguments) if self.full(func) in ("importlib.import_module", "__import__"):
                if arguments and isinstance(arguments[0], ast.Constant):
                    self.named.append((node.lineno, resolve_name(str(arguments[0].value), self.package), False))
                else:
                    self.unknown.append(node.lineno)
            case ast.Constant(value=str(text)):
                self.named += [(node.lineno, name, True) for name in re.findall(r"\w+(?:\.\w+)+", text)]
            case ast.Attribute() if isinstance(full := self.full(node), str):
                self.named.append((node.lineno, full, False))
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if found := self.full(value):
                self.bound[name] = found
            case ast.ClassDef(name=name, bases=bases):
                found = Class(node, [full for base in bases if (full := self.full(base))])
                self.classes.append(found)
                self.bound[name] = found

    def full(self, node: ast.expr) -> str | Class | None:
        """Return a name, or a class of this file, as it is called where it comes from."""
        if isinstance(node, ast.Attribute):
            return f"{full}.{node.attr}" if isinstance(full := self.full(node.value), str) else None
        if isinstance(node, ast.Subscript):
            return self.full(node.value)
        return self.bound.get(node.id, node.id) if isinstance(node, ast.Name) else None


class House:
    """All files of the packages below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
        self.modules = {module.name: module for module in (Module(root, path) for path in paths)}

    def split(self, name: str) -> tuple[str, str]:
        """Return the module of ours that `name` begins with, or nothing, and the rest of it."""
        module = name
        while module and module not in self.modules:
            module = module.rpartition(".")[0]
        return module, name[len(module) :].strip(".")

    def imports(self, module: Module) -> Iterator[tuple[int, str, str]]:
        """Yield the lines in which a module names others of ours, these, and which name in them."""
        for line, name, quoted in module.named:
            target, rest = self.split(name)
            if target not in ("", module.name) and not (quoted and target in PACKAGES):  # that is a word like others
                yield line, target, rest

    @cached_property
    def edges(self) -> dict[str, dict[str, int]]:
        """Which modules each one imports, and in which line first."""
        return {
            name: {target: line for line, target, _ in sorted(self.imports(module), reverse=True)}
            for name, module in self.modules.items()
        }

    @cached_property
    def circles(self) -> dict[str, frozenset[str]]:
        """For each module itself, and the ones that it imports and that import it, over however many steps."""
        reached: dict[str, set[str]] = {}
        for name in self.modules:
            reached[name], ahead = set(), [name]
            while ahead:
                new = self.edges[ahead.pop()].keys() - reached[name]
                reached[name] |= new
                ahead += new
        return {one: frozenset({one} | {two for two in reached[one] if one in reached[two]}) for one in self.modules}

    def longest_chain(self, package: str) -> tuple[str, ...]:
        """Return the longest chain of imports within a package, from its end; imports in a circle are left out."""

        def longest(names: Iterable[str]) -> tuple[str, ...]:
            return max((chain(name) for name in names if self.modules[name].top == package), key=len, default=())

        @cache
        def chain(name: str) -> tuple[str, ...]:
            return (*longest(sorted(self.edges[name].keys() - self.circles[name])), name)

        return longest(self.modules)

    def find(self, base: str | Class) -> Class | None:
        """Return a base that is a class of ours, through whatever modules hand its name on."""
        seen = set()
        while isinstance(base, str) and base not in seen:
            seen.add(base)
            module, name = self.split(base)
            if module and name in self.modules[module].bound:
                base = self.modules[module].bound[name]
        return base if isinstance(base, Class) else None

    def chain(self, one: Class) -> list[Class]:
        """Return the longest chain of classes of ours that ends in `one`; protocols are none."""
        bases = [base for base in map(self.find, one.bases) if base and "typing.Protocol" not in base.bases]
        return [one, *max(map(self.chain, bases), key=len, default=[])]

    def is_error(self, one: Class) -> bool:
        """Whether a class is an exception."""
        is_builtin = any(issubclass(getattr(builtins, str(base), object), BaseException) for base in one.bases)
        return is_builtin or any(self.is_error(base) for base in map(self.find, one.bases) if base)


def no_circles(house: House) -> Iterator[str]:
    """Modules do not import each other in a circle."""
    for circle in sorted(map(sorted, {circle for circle in house.circles.values() if len(circle) > 1})):
        yield f"{len(circle)} modules import each other in a circle: {', '.join(circle)}"
    for module in house.modules.values():
        for line in module.unknown:
            yield f"{module.where}:{line}: imports a module whose name is not written there"


def wings(house: House) -> Iterator[str]:
    """A wing imports those that the table allows, and its docstring says the same."""
    for module in house.modules.values():
        table, wing = WINGS[module.top], module.wing
        if table and wing not in (*table, *FACE.get(module.top, ())):
            yield f"{module.where}: {wing} is not in the tables of scripts/structure.py"
        if wing not in table:
            continue
        for target, line in sorted(house.edges[module.name].items()):
            other = house.modules[target]
            if other.top == module.top and other.wing not in (wing, *table[wing]):
                yield f"{module.where}:{line}: {wing} may not import {target}"
        if module.where == f"{module.top}/{wing}/__init__.py" and (said := may_import(module)) != {*table[wing]}:
            yield f"{module.where}: says that it may import {sorted(said)}, and the table {sorted(table[wing])}"


def may_import(module: Module) -> set[str]:
    """Return the names in "May import: `_base`, `_control`." of a docstring."""
    sentence = re.search(r"^May import: (.*?)\.(\s|$)", ast.get_docstring(module.tree) or "", re.DOTALL | re.MULTILINE)
    return {*re.findall(r"`(\w+)`", sentence[1])} if sentence else {"nothing said"}


def public_names(house: House) -> Iterator[str]:
    """Of another package only the modules that the table allows are imported, and of them the public names."""
    for module in house.modules.values():
        for target, line in house.edges[module.name].items():
            if house.modules[target].top != module.top and target not in PACKAGES[module.top]:
                yield f"{module.where}:{line}: {module.top} may not import {target}"
        for line, target, rest in house.imports(module):
            name = rest.partition(".")[0]
            if target in PACKAGES[module.top] and name not in ("", "*", *public(house.modules[target])):
                yield f"{module.where}:{line}: {name} is no public name of {target}"


def public(module: Module) -> list[str]:
    """Return what a module's `__all__` lists; without one, what it defines, and imports of its own package."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    own = [node for node in module.tree.body if f"{getattr(node, 'module', '')}.".startswith(f"{module.top}.")]
    imported = [alias.asname or alias.name for node in own if isinstance(node, ast.ImportFrom) for alias in node.names]
    defined = [node.name for node in module.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return sorted(name for name in (*imported, *defined) if not name.startswith("_"))


def few_floors(house: House) -> Iterator[str]:
    """The longest chain of imports within a package is short."""
    for package in PACKAGES:
        chain = house.longest_chain(package)
        if len(chain) > FLOORS:
            yield f"{package}: {len(chain)} floors, {FLOORS} at most: {' < '.join(chain)}"


def small_files(house: House) -> Iterator[str]:
    """Folders hold few files, and files few lines."""
    for top, most in [*((package, FILES) for package in PACKAGES), ("tests", TEST_FILES)]:
        folders = [path.parent for path in (house.root / top).rglob("*.py") if path.name != "__init__.py"]
        for folder in sorted({*folders}):
            if folders.count(folder) > most:
                yield f"{folder.relative_to(house.root).as_posix()}: {folders.count(folder)} files, {most} at most"
    for module in house.modules.values():
        if (lines := len(module.text.splitlines())) > LINES:
            yield f"{module.where}: {lines} lines, {LINES} at most"


def flat_classes(house: House) -> Iterator[str]:
    """A class stands on few of our own, errors apart, and no `__getattr__` stands in for a base."""
    for module in house.modules.values():
        for one in module.classes:
            chain = house.chain(one)
            if len(chain) > CLASSES and not house.is_error(one):
                names = " < ".join(each.node.name for each in reversed(chain))
                yield f"{module.where}:{one.node.lineno}: {len(chain)} classes, {CLASSES} at most: {names}"
            for found in sorted({*defined(one.node)} & {"__getattr__", "__getattribute__"}):
                if f"{module.where}: {one.node.name}" not in GETATTR:
                    yield f"{module.where}:{one.node.lineno}: {one.node.name} has a {found}"


def private_names(house: House) -> Iterator[str]:
    """The integrations do not use what is private in torch_join."""
    modules = house.modules.values()
    private = {name for module in modules if module.top == "torch_join" for name in defined(module.tree)} - THEIRS
    for module in modules:
        if module.top != "torch_join":
            for line, name in reached_into(module.tree, {*defined(module.tree)}):
                if is_private(name) and name in private:
                    yield f"{module.where}:{line}: {name} is private in torch_join"


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions, classes, variables and attributes that are defined below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore, and is none of Python's own."""
    return name.startswith("_") and bool(name.strip("_")) and not name.endswith("__")


def reached_into(tree: ast.AST, own: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the names that others are asked for, by attribute, or `getattr` and the like; of `self`, all but `own`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value) not in ("self", "cls") or node.attr not in own):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


RULES = (no_circles, wings, public_names, few_floors, small_files, flat_classes, private_names)


def violations(root: Path) -> list[str]:
    """Return what the sources below `root` do against the rules, each once."""
    house = House(root)
    return [*dict.fromkeys(violation for rule in RULES for violation in rule(house))]


if __name__ == "__main__":
    lines = violations(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
    for line in lines:
        print(line)
    sys.exit(bool(lines))
