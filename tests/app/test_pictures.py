"""The pictures of the README are taken by a walk on committed runs, one of them of a real model."""

import os
import re
import shutil
import struct
import subprocess
import sys

import pytest

from tests.app.browsing import ROOT, chromium_started

EXAMPLE = ROOT / "docs" / "examples" / "smollm2"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.skipif(not EXAMPLE.is_dir(), reason="installed without its repository"),
]


def test_the_command_takes_every_picture_that_documents_show(tmp_path):
    with chromium_started():
        pass  # skipped where there is none
    copy, images = tmp_path / "docs" / "examples" / "smollm2", tmp_path / "docs" / "images"
    for example in (EXAMPLE, EXAMPLE.parent / "long"):
        shutil.copytree(example, copy.parent / example.name)
    images.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, copy / "pictures.py"], cwd=tmp_path, env=environment, check=True, timeout=240)
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {name for path in documents for name in re.findall(r"images/([\w-]+\.png)", path.read_text("utf-8"))}
    taken = {path.name: struct.unpack(">II", path.read_bytes()[16:24]) for path in images.iterdir()}
    assert shown and shown <= set(taken)
    assert taken == {"run.png": (1440, 1000), "tokens.png": (1440, 880), "estimators.png": (1440, 900)}
    assert min(path.stat().st_size for path in images.iterdir()) > 50_000  # no empty page
