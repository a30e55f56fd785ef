"""The command line. Light: it imports the heavy parts only after the configuration is accepted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from dapo_async import config as configs
from dapo_async.errors import ConfigError, RunError
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
    list[str] | None,
    typer.Argument(
        help="Dotted overrides: learner.lr=3e-4 trainer.steps=10; a list or mapping in quotes: "
        "'rollout.engine_urls=\\[http://a:1, http://b:1]'"
    ),
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
        _ask_engine(resolved)
        return
    from dapo_async import app as application

    raise typer.Exit(application.train(resolved, resume))


def _ask_engine(config: configs.Config) -> None:
    """Have SGLang check its arguments, where it is installed: a config may be for other machines.

    Raises:
        ConfigError: it refuses them.
    """
    if config.rollout.engine != "sglang" or config.rollout.engine_urls is not None:
        return
    if importlib.util.find_spec("sglang") is None:
        said = "SGLang's own arguments were not checked: it isn't installed here"
        typer.echo(f"warn  engine: {said} (scripts/setup sglang)", err=True)
        return
    from dapo_async import app as application

    application.check_engine(config)


@app.command()
def doctor(
    config: Annotated[
        Path, typer.Argument(help="YAML file of the run; default: the quickstart's.")
    ] = ROOT / "configs" / "quickstart.yaml",
    overrides: Overrides = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE|FILE",
            help="Judge by these machines instead of what is here: 4x8xH100-80G:1800G, with marks "
            "8xH100-80G@learner_node + 8xH100-80G@rollout_node, or a YAML file with `nodes:`.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check, before anything is started, whether a run can work; exit code 2 if it can't."""
    from dapo_async import doctor as examination
    from dapo_async.preflight.findings import as_json as plain
    from dapo_async.preflight.findings import fails

    findings = examination.doctor(config, overrides or [], cluster)
    if as_json:
        typer.echo(json.dumps(plain(findings)))
    else:
        typer.echo("\n".join(finding.as_text() for finding in findings))
    raise typer.Exit(2 if fails(findings) else 0)


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


ProfilePath = Annotated[
    Path, typer.Option(help="YAML file of what machine, model and task cost (configs/profiles).")
]


@app.command()
def simulate(
    config: ConfigPath,
    profile: ProfilePath,
    overrides: Overrides = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of lengths, outcomes and failures.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary and every step's metrics.")
    ] = False,
) -> None:
    """Predict how a run would go: its pipeline under virtual time, on no GPU."""
    from dapo_async.studies import simulator, tables
    from dapo_async.studies.profile import load_profile

    resolved = configs.load(config, overrides or [])
    found = simulator.simulate(resolved, load_profile(profile), seed)
    if as_json:
        typer.echo(json.dumps({"summary": found.summary, "steps": found.metrics}))
    else:
        typer.echo(tables.show_simulation(found.summary, found.metrics))


@app.command("profile")
def measure_profile(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    out: Annotated[Path, typer.Option(help="File for the profile.")],
) -> None:
    """Measure a profile for `simulate` and `tune` from a run."""
    from dapo_async.studies.measure import measure
    from dapo_async.studies.profile import dump_profile

    text = dump_profile(measure(run))
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"`--out {out}` can't be written: {error.strerror}") from None
    typer.echo(f"written to {out}")


@app.command()
def tune(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file of the run; not with --check.")
    ] = None,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=2, help="GPUs that may be used.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="As for simulate; --check measures its own.")
    ] = None,
    objective: Annotated[
        str, typer.Option(help="tokens (per second), steps (per second) or cost (GPU hours).")
    ] = "tokens",
    steps: Annotated[int, typer.Option(min=4, help="Steps of every simulation.")] = 16,
    max_staleness: Annotated[int, typer.Option(min=0, help="Largest that is tried.")] = 8,
    out: Annotated[Path, typer.Option(help="Folder for config.yaml and pareto.png.")] = Path(
        "tuned"
    ),
    check: Annotated[
        Path | None, typer.Option(help="Folder of a run: compare its prediction with it instead.")
    ] = None,
) -> None:
    """Plan a run by simulation: which GPUs do what, and how far generation may run ahead."""
    from dapo_async.studies import commands

    if check is not None:
        if config is not None or gpus is not None:
            raise ConfigError("`tune --check RUN` takes no config and no --gpus")
        typer.echo(commands.check_run(check, profile))
        return
    if config is None or gpus is None or profile is None:
        raise ConfigError("`tune` needs CONFIG, --gpus and --profile (or --check RUN)")
    typed = ["dapo-async tune", str(config), *(overrides or []), f"--gpus {gpus}"]
    typed += [f"--profile {profile}", f"--objective {objective}", f"--steps {steps}"]
    command = " ".join([*typed, f"--max-staleness {max_staleness}"])
    request = commands.Request(gpus, objective, steps, max_staleness, command)
    resolved = configs.load(config, overrides or [])
    typer.echo(
        commands.plan_run(resolved, profile, request, out, lambda said: typer.echo(said, err=True))
    )


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The page; default: report.html in the RUN, of several runs here."),
    ] = None,
) -> None:
    """Write one HTML page about runs, to open offline, and trace.json (Perfetto) into each."""
    from dapo_async.studies.report import write_report

    written = write_report(runs, out)
    for path in (written.page, *written.traces):
        typer.echo(f"written to {path}")


@app.command()
def ablate(
    study: Annotated[Path, typer.Argument(help="YAML file of the study (docs/howto/ablate.md).")],
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: the study's.")
    ] = None,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Simulate every run instead of training it.")
    ] = False,
    profile: Annotated[Path | None, typer.Option(help="As for simulate; with --simulate.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results; default: runs/ablations/<name>, with --simulate "
            "runs/ablations/<name>-simulated."
        ),
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing; report what is there.")
    ] = False,
) -> None:
    """Run a study, a grid of settings × seeds, and report what its differences amount to."""
    from dapo_async.studies.ablation import commands

    if simulated != (profile is not None):
        raise ConfigError("`ablate --simulate` and `--profile` go together")
    if jobs is not None and report_only:
        raise ConfigError("`ablate --jobs` would be ignored: --report-only runs nothing")
    request = commands.Request(study, out, jobs, profile, report_only)
    raise typer.Exit(commands.ablate(request, lambda said: typer.echo(said, err=True)))


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
