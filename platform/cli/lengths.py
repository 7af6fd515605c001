"""``loomserve lengths``: trains and measures predictors of output lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.cli.tables import Figure, Row, display, fixed, say, table
from loomserve.platform.lengths.training.samples import folds_of, read_all
from loomserve.platform.models import catalog

if TYPE_CHECKING:
    from loomserve.platform.lengths.training.evaluation import PredictorScore

lengths = typer.Typer(no_args_is_help=True, help="Predict how long answers will be.")


Files = Annotated[
    list[Path],
    typer.Argument(
        help="JSON lines, also gzipped: instruction or input or both (text), out_tokens; "
        "in_tokens and task if known."
    ),
]
Embeddings = Annotated[
    str, typer.Option(help="Model whose token embeddings are read: demo, demo:NAME, or a folder.")
]
Column = Annotated[
    str | None,
    typer.Option("--model", help="Model whose lengths are taken, if out_tokens has several."),
]


@lengths.command()
def train(
    files: Files,
    name: Annotated[str, typer.Option(help="Name of the predictor: the served model's name.")],
    kind: Annotated[str, typer.Option(help="magnus or uellm.")] = "magnus",
    embeddings: Embeddings = "demo",
    model: Column = None,
) -> None:
    """Train a predictor, and make it the current version of that name."""
    if kind not in ("magnus", "uellm"):
        raise ConfigError(f"--kind {kind!r}: write magnus or uellm")
    from loomserve.platform.lengths.predict.embedding import TokenEmbeddings
    from loomserve.platform.lengths.stored import folder_of, remember_embeddings

    folder = folder_of(name)
    model_folder = _model_folder(embeddings)
    known = TokenEmbeddings(model_folder)
    samples = read_all(files, known.tokens, model)
    # Imported here: scikit-learn takes seconds.
    from loomserve.platform.lengths.training import fit
    from loomserve.platform.lengths.training.versions import PredictorVersions

    fitted, learnt = fit.train(kind, samples, folds_of(samples), known, calibrate_on=0)
    version = PredictorVersions(folder).publish(fitted, learnt)
    remember_embeddings(folder, model_folder)
    say(
        f"{len(samples)} samples, of which {len(samples) - len(learnt.rows)} calibrated the "
        f"interval; version {version.number} is current in {folder}"
    )


@lengths.command()
def evaluate(
    files: Files,
    embeddings: Embeddings = "demo",
    model: Column = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the table as JSON to this file, too.")
    ] = None,
) -> None:
    """Compare all predictors on requests unlike those that each was trained on."""
    from loomserve.platform.lengths.predict.embedding import TokenEmbeddings

    known = TokenEmbeddings(_model_folder(embeddings))
    samples = read_all(files, known.tokens, model)
    from loomserve.platform.lengths.training import evaluation

    scores = evaluation.evaluate(samples, known)
    display(*tables(scores))
    if save is not None:
        try:
            save.write_text(json.dumps([asdict(score) for score in scores], indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"--save {save}: cannot be written ({error.strerror})") from None


def tables(scores: Sequence[PredictorScore]) -> Iterator[Table | None]:
    """One table for each task with one row for each predictor; shares in percent."""
    for task in sorted({score.task for score in scores}):
        of_task = [score for score in scores if score.task == task]
        title = f"{task}: {of_task[0].requests} requests; shares in percent"
        yield table(title, map(_row, of_task))


def _row(score: PredictorScore) -> Row:
    return {
        "predictor": score.predictor,
        "bucket": fixed(100 * score.bucket),
        "±1": fixed(100 * score.near),
        "MAE": fixed(score.mae),
        "r": Figure() if score.r is None else fixed(score.r, 2),
        "in 90": fixed(100 * score.coverage),
        "width": fixed(score.width, 0),
        "ms": fixed(score.p50_ms, 2),
    }


def _model_folder(source: str) -> Path:
    folder = catalog.resolve(source, Path(), progress=say)
    if isinstance(folder, str):
        raise ConfigError(f"--embeddings {source!r}: give a model's folder, or demo")
    return folder
