"""The recipe that a run folder holds: the web UI's limits hold for it, too, since the folder may come from anywhere."""

from __future__ import annotations

from pathlib import Path

from halftune.config.reading.yaml_source import parse, read_text
from halftune.config.sections.training import GenerationSection
from halftune.config.tree import child
from halftune.core.errors import ConfigError
from halftune_webui.paths import check_links, is_below
from halftune_webui.recipes.recipe import outside
from halftune_webui.runs.started import CONFIG, folder_of, read_started
from halftune_webui.runs.state import RESOLVED
from halftune_webui.settings import Settings


def command(settings: Settings, run: Path) -> list[str]:
    """What starts a run, or goes on with it: made of the run's place alone, never of the notes in its folder.

    Raises:
        HalftuneError: there is no recipe, or it leaves the web UI's limits.
    """
    if (run / RESOLVED).is_file():
        file, how = run / RESOLVED, ["--rerun", str(run), f"training.output_dir={run}", "training.resume=auto"]
    elif (folder_of(run) / CONFIG).is_file():  # it ended before its first step
        file = folder_of(run) / CONFIG
        how = ["--config", str(file)]
    else:
        what = "nothing says what this run is"
        raise ConfigError(what, where=str(run), remedy="start it again from its recipe", code="webui.recipe_lost")
    _check(settings, run, file, working_folder(settings, run))
    return [*settings.program, "train", *how]


def recipe_of(run: Path) -> str:
    """The recipe of a run as text, for another run: as it was written where the web UI has it, else with every key.

    Raises:
        HalftuneError: there is none, or it is a link.
    """
    for file in (folder_of(run) / CONFIG, run / RESOLVED):
        if file.is_file():
            return read_text(file, root=run)
    what = "nothing says what this run is"
    raise ConfigError(what, where=str(run), remedy="start it again from its recipe", code="webui.recipe_lost")


def words_of(run: Path) -> list[str]:
    """The command line that does what a run does."""
    config = folder_of(run) / CONFIG
    how = ["--config", str(config)] if config.is_file() else ["--rerun", str(run)]
    return ["halftune", "train", *how]


def working_folder(settings: Settings, run: Path) -> Path:
    """Where a run was started, as far as that lies under the web UI's folders; else where the web UI was."""
    before = read_started(run)
    folder = Path(before.cwd) if before is not None and before.cwd else settings.roots[0]
    known = folder.is_dir() and is_below(settings.roots, folder)
    return folder if known else settings.roots[0]


def check_model(settings: Settings, run: Path, *sections: str) -> None:
    """Makes sure that a run's model may be loaded, whatever data it was trained on.

    Args:
        settings: the limits.
        run: the run.
        sections: of the recipe that are used; by default its model alone.

    Raises:
        HalftuneError: it lies outside the web UI's folders, or would run code.
    """
    if not (run / RESOLVED).is_file():
        what = "nothing says what this run is"
        raise ConfigError(what, where=str(run), remedy="train it again from its recipe", code="webui.recipe_lost")
    _check(settings, run, run / RESOLVED, settings.roots[0], *(sections or ("model",)))


def generation_of(run: Path) -> GenerationSection:
    """How the run's recipe lets answers be decoded; as by default where it says nothing that can be read."""
    try:
        recipe = parse(read_text(run / RESOLVED, root=run), RESOLVED).values
        return GenerationSection.model_validate(child(recipe, "generation"))
    except (ConfigError, ValueError):
        return GenerationSection()


def _check(settings: Settings, run: Path, file: Path, start: Path, *sections: str) -> None:
    check_links(settings.roots, run)
    tree = parse(read_text(file, root=run), str(file))
    for folder in (file.parent, start):
        for problem in outside(tree, settings, start, folder):
            if not sections or problem.key[0] in sections:
                raise problem
