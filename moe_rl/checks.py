"""Integrity checks: sizes and SHA-256 sums of files, and JSON documents that contain their own checksum. Every
subpackage may import this module; it imports none of them."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_rl.files import sync_folder, write_json


def parse_json(text: str | bytes) -> Any:
    """Parse JSON as `json.loads` does, but raise ValueError for every failure; a damaged file may hold a million
    brackets, for which `json.loads` raises RecursionError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `content` with the SHA-256 sum of its JSON form under the key `sha256`."""
    return {**content, "sha256": sha256_of_bytes(json.dumps(content, sort_keys=True).encode())}


def is_sealed(content: Any) -> bool:
    """Return whether `content` is what `sealed` returned, after any number of writings and readings as JSON."""
    return isinstance(content, dict) and sealed({k: v for k, v in content.items() if k != "sha256"}) == content


def sha256_of_bytes(data: bytes) -> str:
    """Return the SHA-256 sum of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 sum of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 sum of every file in a folder and its subfolders, by relative path."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def seal_folder(folder: Path, manifest: str, content: Mapping[str, Any]) -> None:
    """Write `content`, sealed, with the `digests` of all files of the folder under the key `files`, as the folder's
    last file, named `manifest`; then flush all files to the disk."""
    write_json(folder / manifest, sealed({**content, "files": digests(folder)}))
    for path in folder.rglob("*"):  # also in subfolders: tokenizers put templates into one
        if path.is_dir():
            sync_folder(path)
            continue
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def other_content(folder: Path, written: Mapping[str, str]) -> str:
    """Return a message about the first file of `written`, which `digests` returned, that is missing or has changed;
    empty if there is none."""
    for name, digest in written.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if sha256_of(path) != digest:
            return f"{path} is damaged: its content is not what was written"
    return ""


def changed_since(folder: Path, *manifests: str) -> str:
    """Return a message about the first file that is missing or has changed since the folder's manifests were written;
    empty if there is none, or the folder has none of `manifests`.

    A manifest is a sealed JSON file with the `digests` of the other files under the key `files`."""
    for path in (folder / name for name in manifests if (folder / name).is_file()):
        try:
            stored = parse_json(path.read_bytes())
        except ValueError as error:
            return f"{path} is damaged ({error})"
        if isinstance(stored, dict) and "files" in stored:
            wrong = other_content(folder, stored["files"]) if is_sealed(stored) else f"{path} is damaged"
            if wrong:
                return wrong
    return ""


def damage_of(rows: bytes, size: int, sha256: str) -> str:
    """Return what is wrong with `rows`, of which `size` bytes of JSON lines with the sum `sha256` were written, and
    where the damage shows first; empty if nothing is wrong."""
    if sha256_of_bytes(rows) == sha256:
        return ""
    for number, line in enumerate(rows.splitlines(), start=1):
        try:
            parse_json(line)
        except ValueError:
            return f"line {number} is damaged"
    if len(rows) < size:
        return f"it has {len(rows)} of the {size} bytes that were written (missing or cut off)"
    return "a line is not what was written, though all can be read: a changed number, or rows in another order"


def sizes(folder: Path, *patterns: str) -> dict[str, int]:
    """Return the size in bytes of every file below a folder that matches a pattern, by relative path; hidden files are
    left out."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file() and path.name[0] != "."}
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(found)}


def other_size(folder: Path, written: Mapping[str, int]) -> str:
    """Return a message about the first file of `written`, which `sizes` returned, that is missing or has another size;
    empty if there is none."""
    for name, size in written.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} is damaged: it has {path.stat().st_size} of {size} bytes"
    return ""


def unreadable_weights(folder: Path) -> str:
    """Return a message about the first file of a model's weights in a folder that is missing or, if it is a safetensors
    file or an index, cannot be read, or about a folder without weights; empty if nothing is wrong, or there is no such
    folder."""
    if not folder.is_dir():
        return ""
    for whole in ("model.safetensors", "pytorch_model.bin"):  # the order in which transformers looks for them
        if (folder / whole).is_file():
            return unreadable(folder / whole) if whole.endswith(".safetensors") else ""
        if (index := folder / f"{whole}.index.json").is_file():
            try:
                shards = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # also JSON that is no index
                return f"{index} cannot be read ({error})"
            missing = [name for name in shards if not (folder / str(name)).is_file()]
            if missing:
                return f"{folder / str(missing[0])} is missing, which {index.name} names"
            of_safetensors = [folder / name for name in shards if name.endswith(".safetensors")]
            return next(filter(None, map(unreadable, of_safetensors)), "")
    if any((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        return ""  # weights under another name: loading the model tells whether they fit
    return f"{folder} holds no weights (no model.safetensors)"


def unreadable(path: Path) -> str:
    """Return a message about why a safetensors file cannot be read, judged by its header and size; empty if it can be.

    safetensors' own errors name no file, and report a file without read permission as a missing file."""
    from safetensors import SafetensorError, safe_open

    try:
        with open(path, "rb"), safe_open(path, "pt"):
            return ""
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"
    except SafetensorError as error:
        return f"{path} is damaged ({error})"
