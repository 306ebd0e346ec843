"""Random damage to bytes, texts, JSON values and files."""

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, "", "x", " ", "\x00", "é漢🙂", "../../etc/passwd", "a" * 5000, "-1", "nan", "1e400",
    0, -1, 1, 2, 7, 10**6, 10**30, -(10**30), 0.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"),
    [], {}, [[]], [1, 2, 3], ["x"], {"x": 1}, [None], {"kind": "rollout"},
)  # fmt: skip


def flipped(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with one random bit flipped."""
    changed, place = bytearray(data), rng.randrange(8 * len(data))
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes damaged at random: bits flipped, cut off, a part removed, doubled or zeroed, or foreign bytes."""
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice([1, 2, 5, 50, 5000]))
    kind = rng.randrange(8)
    if kind == 0 or not data:
        return b"" if not data else flipped(rng, data)
    if kind == 1:
        return data[:start]
    if kind == 2:
        return data[:start] + data[end:]
    if kind == 3:
        return data[:end] + data[start:]
    if kind == 4:
        return data[:start] + bytes(end - start) + data[end:]
    if kind == 5:
        return data[:start] + rng.randbytes(rng.choice([1, 8, 100])) + data[start:]
    if kind == 6:
        for _ in range(rng.randint(2, 30)):
            data = flipped(rng, data)
        return data
    return rng.choice(
        [b"", b"\x00", b"null", b"[]", b"{}", b"0", b"\xff\xfe", b"PAR1", b"[" * 100_000, rng.randbytes(300)]
    )


def damaged_value(rng: random.Random, value: Any) -> Any:
    """Return a copy of a JSON value in which up to four entries are replaced, removed, or renamed."""
    value = json.loads(json.dumps(value)) if not isinstance(value, str | int | float | None) else value
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        for key in list(part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()):
            places.append((part, key))
            walk(part[key])

    walk(value)
    if not places or rng.random() < 0.02:
        return rng.choice(ODD)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        part, key = rng.choice(places)
        kind = rng.randrange(6)
        if isinstance(part, dict) and key in part and kind == 0:
            del part[key]
        elif isinstance(part, dict) and key in part and kind == 1:
            part[str(rng.choice(ODD))] = part.pop(key)
        elif isinstance(part, dict) or (isinstance(part, list) and key < len(part)):
            part[key] = rng.choice(ODD)
    return value


def damaged_text(rng: random.Random, text: str) -> str:
    """Return a text with a line or number replaced, removed or inserted, or damaged as bytes."""
    lines = text.split("\n")
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(7)
    if kind == 0:
        del lines[place]
    elif kind == 1:
        lines[place] = lines[other]
    elif kind == 2:
        lines[place] = "  " + lines[place] if rng.random() < 0.5 else lines[place].lstrip()
    elif kind == 3:
        lines[place] = re.sub(r"[^:\s]+$", lambda _: str(rng.choice(ODD)), lines[place])
    elif kind == 4:
        lines[place] = re.sub(r"-?\d[\d.e-]*", lambda _: str(rng.choice(ODD)), lines[place])
    elif kind == 5:
        lines.insert(place, rng.choice(["&a [*a]", "- [", "? :", "<<: *x", "!!python/object:os.system x", "%", "\t"]))
    else:
        return damaged_bytes(rng, text.encode()).decode("utf-8", "surrogateescape")
    return "\n".join(lines)


def damaged_file(rng: random.Random, path: Path) -> str:
    """Damage or remove a file; return a description of the damage."""
    kind = rng.choice(["bytes", "bytes", "flip", "missing", "empty", "folder", "other", "dangling", "values"])
    data = path.read_bytes()
    if kind == "flip" and data:
        path.write_bytes(flipped(rng, data))
    elif kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "other":
        others = [other for other in path.parent.iterdir() if other.is_file() and other != path]
        path.write_bytes(rng.choice(others).read_bytes() if others else b"x")
    elif kind == "dangling":
        path.unlink()
        path.symlink_to(path.name)
    elif kind == "values" and path.suffix in (".json", ".jsonl", ".yaml", ""):
        path.write_text(damaged_text(rng, data.decode(errors="replace")), errors="surrogateescape")
    else:
        path.write_bytes(damaged_bytes(rng, data))
    return f"{kind} {path.name}"


def restored(folder: Path, whole: Path) -> Path:
    """Replace `folder` by a fresh copy of `whole` and return it."""
    if folder.is_symlink():
        os.unlink(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(whole, folder, symlinks=True)
