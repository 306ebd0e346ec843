"""Is what was written what is there? Sizes and SHA-256 sums of files, and JSON that carries its own. Every room may use
it; it knows none of them."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_rl.files import sync_folder, write_json


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, of which whatever goes wrong is a ValueError: damage can be a million brackets."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content`, which is to be JSON, with its own SHA-256 sum under `sha256`."""
    return {**content, "sha256": sha256_of_bytes(json.dumps(content, sort_keys=True).encode())}


def is_sealed(content: Any) -> bool:
    """Whether `content` is what `sealed` returned, after any number of writings and readings as JSON."""
    return isinstance(content, dict) and sealed({k: v for k, v in content.items() if k != "sha256"}) == content


def sha256_of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder and below, by relative name."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def seal_folder(folder: Path, manifest: str, content: Mapping[str, Any]) -> None:
    """Write `content`, sealed, with the `digests` of all files under `files`, as the folder's last file; flush all."""
    write_json(folder / manifest, sealed({**content, "files": digests(folder)}))
    for path in folder.rglob("*"):  # tokenizers put templates into a folder of their own
        if path.is_dir():
            sync_folder(path)
            continue
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def other_content(folder: Path, written: Mapping[str, str]) -> str:
    """The first of the files that `digests` once found which is not there as it was, in words; empty if none."""
    for name, digest in written.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if sha256_of(path) != digest:
            return f"{path} is damaged: its content is not what was written"
    return ""


def changed_since(folder: Path, *manifests: str) -> str:
    """What is no longer as it was when a JSON file of the folder was written, sealed, with the `digests` of the others
    under `files`; in words, empty if there is nothing, or none of `manifests`."""
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
    """What is wrong with the `size` bytes of JSON lines of that SHA-256 sum of which these are left, and where it shows
    first; empty if nothing."""
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
    """Bytes of the files below a folder that match, by relative name; hidden ones are left out."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file() and path.name[0] != "."}
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(found)}


def other_size(folder: Path, written: Mapping[str, int]) -> str:
    """The first of the files that `sizes` once found which is not there as it was, in words; empty if there is none."""
    for name, size in written.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} is damaged: it has {path.stat().st_size} of {size} bytes"
    return ""


def unreadable_weights(folder: Path) -> str:
    """The first file of a model's weights in a folder that is missing or cannot be read, and why, in words; empty if
    there is none, or no such folder."""
    if not folder.is_dir():
        return ""
    for whole in ("model.safetensors", "pytorch_model.bin"):  # in transformers' order
        if (folder / whole).is_file():
            return unreadable(folder / whole) if whole.endswith(".safetensors") else ""
        if (index := folder / f"{whole}.index.json").is_file():
            try:
                shards = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # of JSON that is no index
                return f"{index} cannot be read ({error})"
            missing = [name for name in shards if not (folder / str(name)).is_file()]
            if missing:
                return f"{folder / str(missing[0])} is missing, which {index.name} names"
            of_safetensors = [folder / name for name in shards if name.endswith(".safetensors")]
            return next(filter(None, map(unreadable, of_safetensors)), "")
    if any((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        return ""  # of another name: loading says whether they are the model's
    return f"{folder} holds no weights (no model.safetensors)"


def unreadable(path: Path) -> str:
    """Why a safetensors file cannot be read, in words, from its header and its size; empty if it can. safetensors names
    no file, and says of one that may not be read that there is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with open(path, "rb"), safe_open(path, "pt"):
            return ""
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"
    except SafetensorError as error:
        return f"{path} is damaged ({error})"
