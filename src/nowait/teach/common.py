"""What the teaching notebooks share: pictures that sliders draw again, exercises that check themselves, cells that are meant to break.

A module of this package has PICTURES {file stem: drawing function} and EXERCISES {name: cases}. A drawing function has a default for every argument,
takes under 100 ms and never trains. `python -m nowait.teach.common` writes each picture at its defaults to figures/teach, where readers without a
kernel see it.
"""

from __future__ import annotations

import functools
import importlib
import io
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from nowait import teach
from nowait.analysis.drawing import styled


class Picture(bytes):
    """A PNG that a notebook shows."""

    def _repr_png_(self) -> bytes:
        return bytes(self)


@styled
def png(figure: Figure) -> Picture:
    """The same bytes wherever the same versions draw it."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=100, metadata={"Software": None}, pil_kwargs={"compress_level": 1})
        return Picture(file.getvalue())


def show(draw: Callable[..., Figure], interactive: bool = True, **controls):
    """A widget: the picture of `draw` at its defaults, and one control per keyword that draws it again; without `interactive`, the picture alone.

    A control is what ipywidgets.interactive takes, (lowest, highest, step) for a slider or a list of choices, and every argument of `draw` needs one.
    """
    import ipywidgets

    picture = png(draw())
    if not interactive:
        return picture
    image = ipywidgets.Image(value=picture)

    @functools.wraps(draw)  # whose defaults the controls start at
    def redraw(**values) -> None:
        image.value = png(draw(**values))

    return ipywidgets.VBox([ipywidgets.interactive(redraw, **controls), image])


def check(exercise: str, answer: Callable) -> None:
    """Print whether `answer` solves the exercise MODULE/NAME. A wrong answer gets a hint; nothing stops the notebook.

    A case is (arguments, right result, hint); an answer of None is not solved yet.
    """
    module, _, name = exercise.partition("/")
    for arguments, right, hint in importlib.import_module(f"{teach.__name__}.{module}").EXERCISES[name]:
        try:
            found = answer(*arguments)
            if found is None:
                print(f"{exercise}: not solved yet")
                return
            wrong = not np.allclose(np.asarray(found, float), right, rtol=1e-4)
        except Exception as error:
            wrong, found = True, f"{type(error).__name__}: {error}"
        if wrong:
            print(f"{exercise}: not right yet. It gave {found} for {', '.join(map(str, arguments))}. Hint: {hint}")
            return
    print(f"{exercise}: solved")


@contextmanager
def broken() -> Iterator[None]:
    """For a cell that breaks something on purpose: shows the error that follows, and raises AssertionError where none does."""
    try:
        yield
    except Exception as error:
        print(f"broken, as it should be: {type(error).__name__}: {error}")
    else:
        raise AssertionError("nothing broke: the claim above holds even so, or this cell no longer breaks it")


def pictures() -> dict[str, Callable[[], Figure]]:
    """Every picture of the teaching notebooks by file stem."""
    modules = (importlib.import_module(f"{teach.__name__}.{m.name}") for m in pkgutil.iter_modules(teach.__path__))
    return {name: draw for module in modules for name, draw in getattr(module, "PICTURES", {}).items()}


if __name__ == "__main__":
    for stem, draw in pictures().items():
        (Path("figures/teach") / f"{stem}.png").write_bytes(png(draw()))
