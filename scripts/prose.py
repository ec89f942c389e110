"""Print phrases in docs, docstrings and comments that no native engineer would write, each with a replacement."""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FILES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "docs/how-do-i/*.md", "docs/reference/*.md")
SOURCES = ("torch_join/*.py", "torch_join/_[!m]*/**/*.py", "lightning_join/**/*.py", "accelerate_join/**/*.py")
OWNERS = (
    "torch|Lightning|Accelerate|Fabric|Trainer|DeepSpeed|Ray|gloo|autograd|the user|a user|the optimizer|an optimizer"
)
LAST = r"(?!\s+[\w(])"  # a noun that follows makes it English: one of torch's samplers
PHRASES = {
    r"whoever": "name who: a waiting rank, anyone who",
    r"what (is|was|has been) (given|said|read|taken|sent|heard)": "a noun: the objects in the list",
    rf"of (its|their|your|(each|a|this|every) (rank|process)'s) own{LAST}": "its own shard, your own loop",
    rf"of (({OWNERS})'s|yours){LAST}": "a torch sampler, an optimizer step, your loop",
    r"(that|which) some ranks? (does|do) not have": "in the tail, while some rank has finished",
    r"(is|are) told|hears? (of|that)|says? so": "the act: warns, raises on all ranks, is reported",
    r"as ever|goes? on as": "as usual, unchanged, continues",
    r"goes? on": "continues, resumes",
    r"equally many|as many as each": "the same number of",
    r"(has|have) said": "has sent, has reported",
    r"amid|in the midst of": "in the middle of",
    r"(the|its|each \w+'s|a \w+'s) begin|begin of": "start",
}
START = re.compile(r"^(?:[-*] |\d+\. )?Of (?:a|an|the|each|these)\b", re.MULTILINE)


def phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the lines of a page's prose with such a phrase: the line's number, the phrase, what to write instead."""
    prose = re.sub(r"^( *)```.*?^\1```|<!--.*?-->", lambda code: "\n" * code[0].count("\n"), text, flags=re.M | re.S)
    prose = re.sub(r"`[^`\n]+`|\]\([^)\n]+\)|^\([\w-]+\)=$", "", prose, flags=re.M)
    for phrase, instead in PHRASES.items():
        for match in re.finditer(rf"\b({phrase})\b".replace(" ", r"\s+"), prose, re.IGNORECASE):
            yield prose.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead
    for match in START.finditer(prose):
        yield prose.count("\n", 0, match.start()) + 1, match[0], "the subject first"


def remarks(source: str) -> str:
    """Return the docstrings and comments of a source, each at its line."""
    lines = [""] * (source.count("\n") + 2)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for offset, line in enumerate((ast.get_docstring(node) or "").splitlines()):
                lines[node.body[0].lineno + offset] = line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = token.string.removeprefix("# ")
    return "\n".join(lines[1:])


def violations(root: Path) -> Iterator[str]:
    """Yield the phrases of all pages, and of the sources that have none so far."""
    for path in sorted(path for pattern in (*FILES, *SOURCES) for path in root.glob(pattern)):
        text = path.read_text()
        for line, phrase, instead in sorted(phrases(remarks(text) if path.suffix == ".py" else text)):
            yield f"{path.relative_to(root).as_posix()}:{line}: “{phrase}”: {instead}"


if __name__ == "__main__":
    sys.exit("\n".join(violations(Path(__file__).parent.parent)) or 0)
