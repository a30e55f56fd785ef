"""The command line. Light: it imports the heavy parts only after the configuration is accepted."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from dapo_async import config as configs
from dapo_async.errors import RunError
from dapo_async.rewards.child import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
app = typer.Typer(
    help="Asynchronous DAPO training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Dotted overrides: learner.lr=3e-4 trainer.steps=10")
]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PATH",
            help="Go on from a checkpoint: this run's newest good one, or that of a folder.",
        ),
    ] = None,
) -> None:
    """Train a model."""
    resolved = configs.load(config, overrides or [])
    if dry_run:
        typer.echo(configs.dump(resolved), nl=False)
        if resolved.rollout.engine == "sglang" and resolved.rollout.engine_urls is None:
            from dapo_async import app as application

            application.check_engine(resolved)
        return
    from dapo_async import app as application

    raise typer.Exit(application.train(resolved, resume))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run.")],
    out: Annotated[Path, typer.Option(help="Folder for the model.")],
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32; default: what it was trained in.")
    ] = None,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder."""
    from dapo_async.export import export_model

    version = export_model(source, out, dtype)
    typer.echo(f"version {version} written to {out}")


@app.command("make-toy")
def make_toy(
    out: Annotated[Path, typer.Option(help="Folder for the model and the data.")],
    seed: Annotated[int, typer.Option(min=0, help="Seeds data and warm start.")] = 0,
    force: Annotated[bool, typer.Option(help="Make it again even if it is there.")] = False,
) -> None:
    """Make the digit-sorting task: data, and a tiny model warm-started on a sloppy teacher."""
    from rich.progress import Progress

    from dapo_async import toy

    with Progress() as progress:
        bar = progress.add_task("warm start", total=None)
        paths = toy.make_toy(
            out,
            seed,
            force,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    how = "reused" if paths.reused else "made"
    typer.echo(f"{how} {out}: the warm start took {paths.warm_start_cpu_s:.0f} CPU s")


@app.command("convert-smollm2")
def convert_smollm2(
    out: Annotated[Path, typer.Option(help="Folder for the model.")],
) -> None:
    """Convert the packaged SmolLM2-135M-Instruct to a Hugging Face folder (once)."""
    from dapo_async import smollm2

    smollm2.convert(out)
    typer.echo(f"written to {out}")


@app.command()
def quickstart(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(min=0, help="Seeds data, warm start and training.")] = 0,
    engine: Annotated[str, typer.Option(help="Inference engine.")] = "torch",
) -> None:
    """Make the toy task (cached) and train on it: the whole system in a few minutes."""
    toy = Path(".cache") / f"quickstart-seed{seed}"
    command = [sys.executable, "-m", "dapo_async.cli", "make-toy"]
    subprocess.run(
        [*command, "--out", str(toy), "--seed", str(seed)],
        check=True,
        timeout=3600,
        preexec_fn=die_with_parent,
    )
    resolved = configs.load(
        ROOT / "configs" / "quickstart.yaml",
        [
            f"run.seed={seed}",
            f"run.name=quickstart-seed{seed}",
            "run.overwrite=true",
            f"model.path={toy / 'model'}",
            f"data.train={toy / 'train.jsonl'}",
            f"data.eval={toy / 'eval.jsonl'}",
            f"rollout.engine={engine}",
            *(overrides or []),
        ],
    )
    from dapo_async import app as application

    raise typer.Exit(application.train(resolved))


def main() -> None:
    """Entry point: errors of the run become their exit code and one clear message."""
    # transformers imports torchvision where it is; the one that SGLang on a CPU needs is older than
    # torch and says so.
    warnings.filterwarnings("ignore", "Failed to load image Python extension", UserWarning)
    try:
        app()
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
