"""A teaching notebook as a reader has it: JupyterLab in a real browser, run from top to bottom, a slider moved."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NOTEBOOK, TOKEN = "01_anchors", "teach"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address of a JupyterLab over copies of the notebook and its pictures."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "notebooks" / "teach").mkdir(parents=True)
    shutil.copy(ROOT / "notebooks" / "teach" / f"{NOTEBOOK}.ipynb", folder / "notebooks" / "teach")
    shutil.copytree(ROOT / "figures" / "teach", folder / "figures" / "teach")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    own = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    options = ["--no-browser", "--allow-root", f"--port={port}", "--port-retries=0", f"--IdentityProvider.token={TOKEN}", f"--notebook-dir={folder}"]
    with (folder / "log").open("w") as log:
        environment = os.environ | own | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, server, folder / "log")
        yield address
    finally:
        server.terminate()
        server.wait(30)


def wait_for(address: str, server: subprocess.Popen, log: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            return urllib.request.urlopen(f"{address}/api?token={TOKEN}", timeout=5).close()
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"JupyterLab did not start: {log.read_text()[-2000:]}")


@pytest.fixture
def page(lab):
    api = pytest.importorskip("playwright.sync_api", reason="no playwright in this environment: pip install -e '.[dev]' -c constraints.txt")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(90_000)
        page.goto(f"{lab}/lab/tree/notebooks/teach/{NOTEBOOK}.ipynb?token={TOKEN}")
        yield page
        browser.close()


def pixels(picture) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(picture.screenshot())).convert("L"), int)


def test_a_slider_moved_in_the_browser_changes_the_figure(page):
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.get_by_text("anchors/largest: not solved yet").wait_for()  # the last cell has run
    assert page.locator(".jp-RenderedMarkdown img").first.evaluate("image => image.naturalWidth") > 500, "a picture without a kernel"
    widget = page.locator(".widget-vbox", has=page.locator("img.widget-image")).first
    picture, handle = widget.locator("img.widget-image"), widget.locator(".noUi-handle").first
    picture.scroll_into_view_if_needed()
    before = pixels(picture)
    handle.focus()
    handle.press("ArrowRight")
    page.wait_for_function("([image, source]) => image.src !== source", arg=[picture.element_handle(), picture.get_attribute("src")])
    after = pixels(picture)
    assert before.shape == after.shape and (np.abs(before - after) > 32).mean() > 1e-3
