"""The commands checkpoint import-deepspeed and import-megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.options import Json, emit, on_this_machine

Target = Annotated[
    Path, typer.Argument(parser=on_this_machine, help="new folder for model.safetensors, for hf:<target>")
]


def import_deepspeed(
    source: Annotated[
        Path, typer.Argument(parser=on_this_machine, help="folder that DeepSpeed's save_checkpoint wrote")
    ],
    target: Target,
    tag: Annotated[
        str | None, typer.Option(help="name of the checkpoint [default: the one in the file `latest`]")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(parser=on_this_machine, help="config.json of the model, to train it as hf:<target>"),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="unpickle everything: this runs any code in the files")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert the fp32 weights of another project's DeepSpeed ZeRO checkpoint to the Hugging Face format.

    Its files are pickles: a separate process opens them, with an empty environment, and reads only tensors and plain
    data unless --trust is given. Optimiser state is not imported.
    """
    from orchestrator.extensions.importers.deepspeed import import_checkpoint

    imported = import_checkpoint(str(source), str(target), tag, str(config) if config else None, trust)
    how = "unpickled" if trust else "tensors and plain data only"
    of = f"a ZeRO {imported['stage']} checkpoint of {imported['ranks']} ranks, read in a separate process ({how})"
    _imported(target, imported, of, as_json)


def import_megatron(
    source: Annotated[
        Path, typer.Argument(parser=on_this_machine, help="folder that Megatron-LM's --save named")
    ],
    target: Target,
    iteration: Annotated[
        int | None, typer.Option(help="iteration to read [default: the latest that the folder names]")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="rows of the tables to keep [default: all, with Megatron's padding]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert the weights of a GPT's Megatron-LM checkpoint (--ckpt-format torch or torch_dist).

    One without rotary positions becomes GPT-2, one with rotary positions, SwiGLU and RMSNorm Llama. The files are
    pickles; only tensors and plain data are read from them. Optimiser state is not imported.
    """
    from orchestrator.extensions.importers.megatron import import_megatron as take

    imported = take(str(source), str(target), iteration, vocabulary)
    ranks = (
        f"{imported['tensor_parallel']} x {imported['pipeline_parallel']} ranks (tensor x pipeline parallel)"
    )
    _imported(
        target,
        imported,
        f"a {imported['model_type']}, of iteration {imported['iteration']} on {ranks}",
        as_json,
    )


def _imported(target: Path, imported: dict[str, Any], of: str, as_json: bool) -> None:
    if as_json:
        emit(imported)
    else:
        print(f"{target}: {len(imported['tensors'])} tensors of {of}")
