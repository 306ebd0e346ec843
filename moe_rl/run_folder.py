"""The run folder as an interface: a writer of its rows, for any trainer. docs/run_folder.md describes it in full.

    with RunWriter("runs/mine", arm="grpo", seed=0) as run:
        run.rollout(0, reward=0.25)
        run.update(0, 1, loss=0.1, grad_norm=1.0)
        run.probe(0, 1, **change_metrics(change_counts(old_routes, new_routes, mask)))

`moe_rl.study.load`, `moe-rl figures` and `moe-rl watch` read what `RunWriter` writes. The subpackages that
`moe_rl.study` uses import it from this module.
"""

import json
import operator
import os
import platform
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

from moe_rl.done import NAME as DONE
from moe_rl.done import write_done
from moe_rl.files import atomic_file, naming, sole_writer, write_atomic, write_json
from moe_rl.names import arm_refusal, nearest, run_place, seed_of
from moe_rl.run_rows import (
    ROWS,
    RunFolderError,
    check_counts,
    check_lists,
    checked,
    index_of,
    read_rows,
    token_columns,
    with_other_updates,
    words_of,
)
from moe_rl.runlog import json_line
from moe_rl.settings import differences, laid_over, listed, plain
from moe_rl.starts import NOT_INSTALLED, begun_under, version_of
from moe_rl.tables import read_table, write_table
from moe_rl.yaml_files import parse_yaml

PACKAGES = ("moe_rl", "torch", "transformers", "trl", "ms_swift", "verl", "vllm", "sglang", "peft", "accelerate")


class RunWriter:
    """A writer that appends the rows of one run, of any trainer, to a run folder that the laboratory reads.

    Every row is on the disk when its method returns. In a folder that holds rows already, the writer removes a last
    line that was cut off, goes on with the rows, and refuses a row that is there already (`next_step`, `rewind`).
    Numbers may be tensors or arrays; numbers that are not finite are written as null. Leaving the `with` block without
    an exception, or `finish`, writes `DONE`. After an exception there is no `DONE`, and the traceback is in
    STUDY/logs/ARM_seedN.log, where the live page finds it.

    Args:
        folder: the study's folder; the run is `folder/ARM/seedN`. A path that ends so already is the run itself.
        arm: the name of what is compared, such as a method or a setting; also the name of a folder.
        seed: the number of the repetition.
        config: plain values to keep in config.yaml. Figures read `label`, `objective`, `replay` and
            `optim: {steps: N}` (docs/run_folder.md).
        defaults: values that stand for settings of earlier versions, nested as `config`: a folder whose `config.yaml`
            lacks a setting, because an earlier version wrote it, can be continued if the setting has this value now.
        free: settings, dotted as in `arguments.output_dir`, that may have another value when the run goes on. The
            number of steps, `optim.steps`, always may.

    Attributes:
        folder: the run folder, `Path`.

    Raises:
        RunFolderError: the folder is done, or holds another run; an arm, a seed or a config that cannot be kept; for a
            row: an unknown metric name (the message has the nearest one; a name with a slash is the trainer's own, and
            is kept), a value that does not fit its metric, a row that is there already or of an earlier step than the
            last of its kind, a writer that was closed.
        InUseError: another process writes to the folder.
        OSError: naming the file; the rows written before are whole.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        arm: str,
        seed: SupportsIndex = 0,
        config: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        free: Collection[str] = (),
    ):
        self.folder = _run_folder(folder, arm, seed)
        self._metrics, self._started = self.folder / "metrics.jsonl", time.time()
        self._failure = run_place(self.folder).parent.parent / "logs" / f"{arm}_seed{seed}.log"
        self._seen: set[tuple[Any, ...]] = set()
        self._last: dict[str, int] = {}
        self._closed = False
        command = shlex.join(sys.argv)
        with ExitStack() as stack:
            stack.enter_context(sole_writer(self.folder, command))
            if (self.folder / DONE).exists():
                raise RunFolderError(
                    f"{self.folder} holds a finished run. Choose another folder, or delete its file DONE to go on."
                )
            self._keep_config({**(config or {}), "arm": arm, "seed": operator.index(seed)}, plain(defaults or {}), free)
            about = _environment(command)
            self._read()
            if self._last:
                about |= begun_under(self.folder, about)
            write_json(self.folder / "env.json", about)
            self._failure.unlink(missing_ok=True)
            self._lock = stack.pop_all()

    def rollout(self, step: SupportsIndex, *, reward: Any, **metrics: Any) -> None:
        """Write the row of one sampled batch. `step` counts batches from 0; `reward`: mean over its responses, None
        where unknown."""
        self.row("rollout", step, reward=reward, **metrics)

    def update(self, step: SupportsIndex, update: SupportsIndex, **metrics: Any) -> None:
        """Write the row of one optimizer step on the batch `step`; `update` counts from 1 within the batch."""
        self.row("update", step, update=update, **metrics)

    def probe(self, step: SupportsIndex, update: SupportsIndex, **metrics: Any) -> None:
        """Write the row of a probe: what an update changed on fixed tokens, from the old policy of the step to the
        weights after `update`."""
        self.row("probe", step, update=update, **metrics)

    def eval(self, step: SupportsIndex, **metrics: Any) -> None:
        """Write the row of an evaluation on held-out prompts."""
        self.row("eval", step, **metrics)

    def timing(self, step: SupportsIndex, *, seconds: float, **metrics: Any) -> None:
        """Write the row of the wall time of a step, in seconds."""
        self.row("step", step, seconds=seconds, **metrics)

    def engine(self, step: SupportsIndex, pair: str, *, update: SupportsIndex = 0, **metrics: Any) -> None:
        """Write the row of the gap between two engines' scores of the same tokens. pair: which two, that is `engines`,
        `engines_replayed` or `rollout_to_new`."""
        self.row("engine", step, pair=pair, update=update, **metrics)

    def tokens(self, step: SupportsIndex, **columns: Any) -> None:
        """Write `tokens/step_NNNNNN.parquet`: a row per response token and update, for the figures and views of tokens.

        columns: arrays of one length, named as in the section "tokens" of docs/metrics.md: `seq`, `pos`, `token`,
            `update`, `flips`, `old_logp` and `logp_natural` are needed; `logp_replayed`, `reward` and `text` may be
            left out. Write all updates of a step at once or one after the other; an update that is there is replaced.
        """
        self._open()
        path = self.folder / "tokens" / f"step_{index_of(step, 'step', 'tokens', 0):06d}.parquet"
        write_table(path, with_other_updates(path, token_columns(columns)))

    def row(self, kind: str, step: SupportsIndex, /, **metrics: Any) -> None:
        """Write a row of any kind of `ROWS`; the keys of that kind are among the metrics."""
        if kind not in ROWS:
            raise RunFolderError(f"no kind of row {kind!r}{nearest(kind, ROWS)}")
        step = index_of(step, "step", kind, 0)
        values = {name: checked(kind, name, value) for name, value in metrics.items()}
        for name in ROWS[kind]:
            if values.get(name) is None:
                raise RunFolderError(f"{kind} rows need {name!r}")
            if name == "update":
                values[name] = index_of(values[name], name, kind, 0 if kind == "engine" else 1)
        if kind == "rollout" and "reward" not in values:  # without it the row cannot be read again
            raise RunFolderError("rollout rows need 'reward', None where it is not known")
        check_lists(kind, values)
        check_counts(kind, values)
        key = (kind, step, *(values[name] for name in ROWS[kind]))
        if key in self._seen or step < self._last.get(kind, 0):
            there = "is there already" if key in self._seen else f"comes after step {self._last[kind]}"
            raise RunFolderError(
                f"{self._metrics}: the {kind} row of {words_of(kind, key)} {there}. A run that goes on from an earlier "
                f"checkpoint calls rewind({step}) first, which drops the rows from there on."
            )
        self._append({"kind": kind, "step": step, **values})
        self._remember(kind, key)

    @property
    def next_step(self) -> int:
        """Return the step to write next: one more than the last step that has a row, 0 in a new folder. Evaluations do
        not count, because the evaluation of step k comes after k batches."""
        return max((step for kind, step in self._last.items() if kind != "eval"), default=-1) + 1

    def rewind(self, step: SupportsIndex) -> int:
        """Drop the rows of `step` and later steps, and their tokens, so that they can be written again; return how many
        rows there were. Among them is the evaluation of `step`, made before its batch: evaluate again."""
        first = index_of(step, "step", "rewind", 0)
        dropped = self._drop(lambda row: row["step"] >= first)
        self._drop_tokens(first, 0)
        return dropped

    def keep_updates(self, count: SupportsIndex) -> int:
        """Drop what was written after the first `count` update rows and the probes of the last of these updates, with
        the tokens measured there; return how many rows there were. For a trainer that returns to a checkpoint inside a
        batch and samples another batch there."""
        count = index_of(count, "count", "keep_updates", 0)
        updates, last, over = 0, None, False

        def after(row: dict[str, Any]) -> bool:
            nonlocal updates, last, over
            place = row["step"], row.get("update")
            if row["kind"] == "update" and updates < count:
                updates, last = updates + 1, place
            else:
                over = over or (updates == count and place != last)
            return over

        dropped = self._drop(after)
        if updates == count:
            self._drop_tokens(*(last or (0, 0)))
        return dropped

    def _drop(self, wanted: Callable[[dict[str, Any]], bool]) -> int:
        """Remove the rows that `wanted` selects; return how many there were."""
        self._open()
        kept, dropped = [], 0
        for line, row in read_rows(self._metrics):
            if wanted(row):
                dropped += 1
            else:
                kept.append(line)
        if dropped:
            with atomic_file(self._metrics) as file:
                file.writelines(kept)
            self._read()
        return dropped

    def _drop_tokens(self, step: int, update: int) -> None:
        """Remove the tables of tokens after `step`, and from the table of `step` what was measured after its first
        `update` updates."""
        for path in sorted((self.folder / "tokens").glob("step_*.parquet")):
            number = int(path.stem.removeprefix("step_"))
            table = read_table(path) if number == step and update else None
            kept = None if table is None else table.filter([n <= update for n in table["update"].to_pylist()])
            if kept:
                write_table(path, dict(zip(kept.column_names, kept.columns, strict=True)))
            elif number >= step:
                path.unlink()

    def finish(self) -> None:
        """Write DONE, which says that the run is complete, and release the folder."""
        self._open()
        write_done(self.folder, seconds=round(time.time() - self._started, 1))
        self.close()

    def close(self) -> None:
        """Release the folder without DONE, so that the run can go on later."""
        self._lock.close()
        self._closed = True

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                if not self._closed:
                    self.finish()
            finally:  # also when the disk is full: whoever opens the folder again can finish the run
                self.close()
            return
        with suppress(OSError):  # the exception of the block matters more than one of the log
            write_atomic(self._failure, "".join(traceback.format_exception(error)))
        self.close()

    def _open(self) -> None:
        """Raise RunFolderError if this writer was closed."""
        if self._closed:
            raise RunFolderError(f"{self.folder}: this writer was closed; open another one to go on")

    def _append(self, row: dict[str, Any]) -> None:
        """Append one row to `metrics.jsonl` and flush the file to the disk; a row that cannot be written whole is
        removed."""
        self._open()
        line = json_line(row)
        with naming(self._metrics), open(self._metrics, "ab", buffering=0) as file:
            size = file.tell()
            try:
                written = file.write(line)
                if written != len(line):
                    raise OSError(f"wrote {written} of {len(line)} bytes")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)  # half a row would spoil the next one
                raise

    def _remember(self, kind: str, key: tuple[Any, ...]) -> None:
        """Note that the row of this kind and key is there."""
        self._seen.add(key)
        self._last[kind] = max(key[1], self._last.get(kind, 0))

    def _read(self) -> None:
        """Note which rows are there, and remove a last line that was cut off."""
        self._seen, self._last = set(), {}
        if not self._metrics.exists():
            write_atomic(self._metrics, b"")
        size = 0
        for line, row in read_rows(self._metrics):
            size += len(line)
            self._remember(row["kind"], (row["kind"], row["step"], *(row.get(k) for k in ROWS.get(row["kind"], ()))))
        if size < self._metrics.stat().st_size:
            with naming(self._metrics):
                os.truncate(self._metrics, size)

    def _keep_config(self, config: dict[str, Any], defaults: dict[str, Any], free: Collection[str]) -> None:
        """Write config.yaml. Raises RunFolderError if the folder holds a run of another configuration, or other files
        and no run."""
        import yaml

        path = self.folder / "config.yaml"
        try:
            config = json.loads(json.dumps(config))
            text = yaml.safe_dump(config, sort_keys=False)
            parse_yaml(text)  # as a later start reads it
        except (TypeError, ValueError) as error:
            raise RunFolderError(
                "config cannot be kept in config.yaml; it must hold plain values (numbers, text, lists, mappings): "
                f"{error}"
            ) from error
        if not path.exists():
            others = [p.name for p in self.folder.iterdir() if not p.name.startswith(".")]
            if others:
                raise RunFolderError(f"{self.folder} holds no run (no config.yaml) but {others[0]}. Choose another.")
            write_atomic(path, text)
            return
        try:
            there = parse_yaml(path.read_bytes())
            if not isinstance(there, dict):
                raise ValueError("it holds no mapping of settings")
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read ({error.strerror}). Nothing was changed.") from error
        except ValueError as error:
            raise RunFolderError(f"{path} is damaged: {error}. Move {self.folder} away to run again.") from error
        changed = differences(laid_over(defaults, there), config)
        changed = {name: pair for name, pair in changed.items() if name not in ("optim.steps", *free)}
        if changed:
            raise RunFolderError(
                f"{self.folder} holds a run of another configuration ({listed(changed)}). Nothing was changed: choose "
                "another folder, or move this one away."
            )
        if there != config:
            write_atomic(path, text)


def _run_folder(given: str | os.PathLike[str], arm: str, seed: SupportsIndex) -> Path:
    """Return the run's folder. Raises RunFolderError for an arm, a seed or a folder that cannot be right."""
    if not os.fspath(given):
        raise RunFolderError("folder: '' would be the current folder; name one, or give '.' for it")
    folder = Path(given).expanduser()
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise RunFolderError(f"{folder}: a folder is needed there, and {place} is a file. Name another folder.")
    if not isinstance(arm, str) or not re.fullmatch(r"\w[\w.+=-]*", arm):
        raise RunFolderError(f"arm {arm!r}: a folder is named so; use text of letters, digits, and . _ - + =")
    refusal = arm_refusal(arm)
    if refusal is not None:
        raise RunFolderError(f"arm {arm!r}: {refusal}")
    seed = index_of(seed, "seed", "run", 0)
    if seed_of(folder) is not None:
        if run_place(folder).parts[-2:] != (arm, f"seed{seed}"):
            raise RunFolderError(
                f"{folder} is not the folder of arm {arm!r}, seed {seed}: expected .../{arm}/seed{seed}"
            )
        return folder
    if any((folder / name).exists() for name in ("metrics.jsonl", "config.yaml")):
        raise RunFolderError(f"{folder} is itself a run; name a study's folder, in which {arm}/seed{seed} is made")
    return folder / arm / f"seed{seed}"


def _environment(command: str) -> dict[str, Any]:
    """Return what `env.json` says of this start: versions of packages, platform, command and time."""
    versions = {name: version_of(name) for name in PACKAGES}
    return {
        "written_by": "moe_rl.study.RunWriter",
        "versions": {name: version for name, version in versions.items() if version != NOT_INSTALLED},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
