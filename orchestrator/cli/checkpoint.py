"""The commands checkpoint list, verify, export, prune and rollback."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from orchestrator.cli.options import Json, Run, emit, existing_run, table
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from orchestrator.checkpoint.commit_store import Store
    from orchestrator.config.workload import WorkloadSpec

RawWeights = Annotated[
    bool, typer.Option("--raw-weights", help="use the weights of training, not their average")
]
Step = Annotated[int | None, typer.Option(help="step of the checkpoint [default: the newest undamaged one]")]
One = Annotated[int | None, typer.Option("--step", help="step of the checkpoint [default: all checkpoints]")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = typer.Typer(no_args_is_help=True, help="List, verify, export, remove and import checkpoints.")
    group.command("list")(list_)
    group.command()(verify)
    group.command()(export)
    group.command()(prune)
    group.command()(rollback)
    app.add_typer(group, name="checkpoint")


def list_(run_dir: Run, as_json: Json = False) -> None:
    """List the checkpoints of a run."""
    store = _store(run_dir)
    checkpoints = [row for step in store.steps() if (row := _describe(store, step)) is not None]
    if as_json:
        emit(checkpoints)
        return
    columns = ["step", "position", "receipt", "layout", "MiB", "created", "state"]
    metrics = [row["evaluation"] for row in checkpoints]
    columns += dict.fromkeys(name for evaluation in metrics for name in evaluation if name.endswith(".loss"))
    rows = [
        [_text((row | evaluation).get(c)) for c in columns]
        for row, evaluation in zip(checkpoints, metrics, strict=True)
    ]
    table("Commits", columns, rows)


def verify(run_dir: Run, step: One = None, as_json: Json = False) -> None:
    """Verify every byte of one checkpoint or of all, and of their token shards. A checkpoint lacks weights that were
    not trained: check that the base still has them. Exit code 1 if something is damaged."""
    from orchestrator.checkpoint.resolve_checkpoint import read_chosen
    from orchestrator.data.store.tokens import problems as problems_of
    from orchestrator.resolve.prepared_data import data_location

    (run, spec), store = existing_run(run_dir), _store(run_dir)

    def look(number: int) -> tuple[list[str], str | None]:
        return _looked_at(spec.workload, spec.reads_base, store, number)

    results = {}
    for number in store.steps() if step is None else [step]:
        try:
            results[number] = read_chosen(store, number, look)
        except InputError:
            if step is not None or number in store.steps():
                raise
    if not results:  # there are none, or all were removed meanwhile
        newest = read_chosen(store, None, lambda number: (number, look(number)))
        results = dict([newest])
    problems = {f"step {number}": lines for number, (lines, _) in results.items()}
    data_folders = {data for _, data in results.values()}
    for uri in sorted(filter(None, data_folders)):
        location = data_location(spec.data, run, uri)
        if location is None:  # which is not a problem: it is made again
            print(f"data {uri} is not there, and was not looked at", file=sys.stderr)
        elif lines := problems_of(location):
            problems[f"data {location}"] = lines
    if as_json:
        emit({key.removeprefix("step "): lines for key, lines in problems.items()})
    else:
        for key, lines in problems.items():
            print(f"{key}: {'sound' if not lines else '; '.join(lines)}")
    if any(problems.values()):
        raise typer.Exit(1)


def _forms(incomplete: str) -> list[str]:
    """The forms of an export with this prefix, for shell completion."""
    from orchestrator.export.converted import forms_of_commits

    return [name for name in forms_of_commits() if name.startswith(incomplete)]


def export(
    run_dir: Run,
    step: Step = None,
    to: Annotated[str | None, typer.Option(help="folder or URI [default: <run>/export]")] = None,
    raw_weights: RawWeights = False,
    form: Annotated[
        str | None,
        typer.Option(
            autocompletion=_forms,
            help="hf, a model for transformers; adapter, the adapter alone for peft; dcp, a folder of "
            "torch.distributed.checkpoint; gguf, a file for llama.cpp; onnx, an encoder for onnxruntime; or what an "
            "installed package offers [default: the job's]",
        ),
    ] = None,
    names: Annotated[
        Literal["hf", "torchtitan", "olmo"] | None,
        typer.Option(help="with --form dcp, the names of the tensors [default: hf]"),
    ] = None,
    numbers: Annotated[
        str | None,
        typer.Option(
            help="with --form gguf f32, f16, bf16, q8_0 or q4_0, the format of the matrices [default: f16]; with "
            "--form onnx f32, int8 or int8_static, whose ranges are measured on training samples [default: f32]"
        ),
    ] = None,
    quantize: Annotated[
        Literal["int8", "int4", "none"] | None,
        typer.Option(
            help="quantise the linear layers of a model for transformers; none: in full precision [default: the job's]"
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help="with --quantize, weights that share a scale, or row [default: 128]"),
    ] = None,
    activations: Annotated[
        Literal["none", "dynamic"] | None,
        typer.Option(help="with --quantize, dynamic: activations are rounded to int8 too [default: none]"),
    ] = None,
    mean_bits: Annotated[
        float | None,
        typer.Option(
            help="with --quantize int4, give int8 to the weights whose rounding adds most to the loss, up to this mean "
            "of bits, such as 5; bits.md of the export has them"
        ),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(help="in place of --mean-bits: up to this many bytes of all tensors of the export"),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="USER/NAME",
            help="also upload it to this repository of the Hugging Face Hub; the token is HF_TOKEN",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="with --push, make a new repository public")
    ] = False,
    as_json: Json = False,
) -> None:
    """Export a checkpoint to a folder for transformers, peft or another framework, and compare the outputs."""
    from orchestrator.checkpoint.resolve_checkpoint import read_chosen
    from orchestrator.config.paths import absolute
    from orchestrator.export import hub
    from orchestrator.export.converted import form_option
    from orchestrator.export.hugging_face import export as write
    from orchestrator.export.quantised import scheme_option
    from orchestrator.storage.uri import check_uri

    run, _ = existing_run(run_dir)
    if to is not None:
        check_uri(to, "--to")
    target = run.at("export") if to is None else absolute(to, Path.cwd())
    scheme = scheme_option(form, quantize, group, activations)
    requested = form_option(form, names, numbers, scheme, mean_bits=mean_bits, max_bytes=max_bytes)
    if public and push is None:
        raise InputError("does nothing without --push", "--public", "add --push USER/NAME")
    if push is not None:
        hub.check_push(push, target)
    exported = read_chosen(
        _store(run_dir), step, lambda number: write(run.uri, number, target, raw=raw_weights, form=requested)
    )
    pushed = {} if push is None else {"pushed": hub.push(target, push, private=not public)}
    if as_json:
        emit(exported | pushed)
    else:
        averaged = ", averaged weights" if "weights" in exported else ""
        apart = exported["logits_difference"]
        same = "" if apart is None else f", logits within {apart:.1e} of transformers'"
        rounded = f", {exported['rounding']:.1e} by rounding" if "rounding" in exported else ""
        print(f"{target}: step {exported['step']}{averaged}{same}{rounded}")
        quantized = exported.get("quantized", {})
        if "mean_bits" in quantized:
            int8 = ", ".join(quantized.get("int8", [])) or "none"
            size = f", {quantized['bytes']:,} bytes" if "bytes" in quantized else ""
            print(
                f"{quantized['mean_bits']:.2f} bits on average{size}, int8 for {int8}; bits.md there has the table"
            )
        if reader := exported.get("tokenizer_class"):
            print(f"read its tokenizer with {reader}: AutoTokenizer makes another one of it", file=sys.stderr)
        for address in pushed.values():
            print(f"pushed to {address}")


def prune(
    run_dir: Run, keep: Annotated[int, typer.Option(min=1, help="number of newest checkpoints to keep")] = 1
) -> None:
    """Remove old checkpoints. Keep the newest, the newest undamaged one, and those that `checkpoint list` shows as
    pinned."""
    from orchestrator.checkpoint.commit_store import Store
    from orchestrator.checkpoint.retention import prune as prune_commits
    from orchestrator.checkpoint.retention import retention_of

    run, spec = existing_run(run_dir)
    retention = dataclasses.replace(
        retention_of(spec.checkpoint, spec.train.decay_from, spec.evaluates_beside), keep=keep
    )
    store = Store(run.commits)
    sound = store.latest()
    if sound is None and store.steps():
        hint = "`orchestrator checkpoint verify` says what is wrong with each"
        raise InputError("no checkpoint is whole, so nothing is removed", run.uri, hint)
    removed = prune_commits(store, retention, [sound.step] if sound else [])
    print(f"removed steps {', '.join(map(str, removed)) or 'none'}")


def rollback(
    run_dir: Run,
    step: Annotated[int, typer.Option(min=1, help="step of the checkpoint to go back to")],
    as_json: Json = False,
) -> None:
    """Take a run back to an earlier checkpoint, and remove the later ones. The same command trains on from there."""
    from orchestrator.launch.rollback import roll_back

    done = roll_back(existing_run(run_dir)[0], step)
    if as_json:
        emit(done.to_json())
    else:
        print(f"{done.line}; the same command continues from there")


def _looked_at(
    workload: WorkloadSpec, reads_base: bool, store: Store, step: int
) -> tuple[list[str], str | None]:
    """The problems of a checkpoint or of the weights that it lacks, and the location of its data if it is undamaged.

    Raises FileNotFoundError if the checkpoint was removed meanwhile."""
    from orchestrator.models.base import base_of_commit

    if problems := store.verify(step):
        if step not in store.steps():
            raise FileNotFoundError(f"{store.location} step {step}")
        return problems, None
    commit = store.manifest(step)
    try:
        base_of_commit(workload, reads_base, commit)
    except InputError as error:
        problems = [f"{error.where}: {error.what}"]
    return problems, commit.meta.get("data")


def _store(run_dir: str) -> Store:
    from orchestrator.checkpoint.commit_store import Store

    run, _ = existing_run(run_dir)
    return Store(run.commits)


def _describe(store: Store, step: int) -> dict[str, Any] | None:
    """The table row of a checkpoint; None if it was removed meanwhile."""
    from orchestrator.checkpoint.evaluations import metrics_of
    from orchestrator.checkpoint.manifest import CorruptCommit
    from orchestrator.checkpoint.pins import holders

    try:
        manifest = store.manifest(step)
    except CorruptCommit as error:
        columns = dict.fromkeys(("position", "receipt", "layout", "MiB", "created"), "")
        return {"step": step, **columns, "state": f"damaged: {error}", "evaluation": {}}
    except InputError:
        if step in store.steps():
            raise
        return None
    layout = manifest.meta.get("layout", {})
    shown = " ".join(f"{k}{v}" for k, v in layout.items() if k in ("pp", "dp", "cp", "tp") and v > 1) or "dp1"
    return {
        "step": step,
        "position": manifest.position,
        "receipt": manifest.receipt,
        "layout": shown,
        "MiB": round(manifest.total_bytes / 2**20, 1),
        "created": manifest.created,
        "state": "; ".join(["committed", *(f"held by {by}" for by in holders(store, step))]),
        "evaluation": metrics_of(store, manifest),
    }


def _text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
