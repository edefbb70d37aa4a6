"""Many people on one dashboard: fifty sessions at once, hundreds of pages, and runs that change under an open page."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import psutil
import pytest

from tests.app.browsing import served

pytestmark = [pytest.mark.slow, pytest.mark.heavy]
PAGES = ("", "run", "tokens", "estimators", "rollouts", "compare")
client = pytest.importorskip("websockets.asyncio.client")


class Session:
    """A page that is open, as a browser speaks to the server; with the exceptions and warnings of its last run."""

    def __init__(self, socket, page: str) -> None:
        self.socket, self.page = socket, page

    async def rerun(self) -> tuple[list[str], list[str]]:
        """Run the page again."""
        from streamlit.proto.BackMsg_pb2 import BackMsg
        from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

        asked = BackMsg()
        asked.rerun_script.page_name, asked.rerun_script.query_string = self.page, "run=chain-otb-s0"
        await self.socket.send(asked.SerializeToString())
        exceptions, warnings = [], []
        while True:
            message = ForwardMsg()
            message.ParseFromString(await self.socket.recv())
            if message.WhichOneof("type") == "script_finished":
                return exceptions, warnings
            element = message.delta.new_element
            if element.WhichOneof("type") == "exception":
                exceptions.append(element.exception.message)
            if element.WhichOneof("type") == "alert":
                warnings.append(element.alert.body)


@asynccontextmanager
async def opened(address: str, *pages: str) -> AsyncIterator[list[Session]]:
    """Open pages, each in a session of its own."""
    place = f"ws://{urlsplit(address).netloc}/_stcore/stream"
    options = {"origin": address, "subprotocols": ["streamlit"], "max_size": None, "open_timeout": 120}
    async with AsyncExitStack() as stack:
        yield [Session(await stack.enter_async_context(client.connect(place, **options)), page) for page in pages]


async def load(address: str, page: str) -> list[str]:
    """Open a page, run it to its end, and leave it; the exceptions it showed."""
    async with opened(address, page) as (session,):
        return (await session.rerun())[0]


def memory() -> float:
    """MB that the servers this process started have in memory."""
    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True)) / 1e6


def test_fifty_sessions_at_once_and_hundreds_of_pages_leave_no_memory_behind(store_root):
    async def visits(address):
        crowd = await asyncio.gather(*(load(address, PAGES[i % len(PAGES)]) for i in range(50)))
        before = memory()
        alone = [await load(address, PAGES[i % len(PAGES)]) for i in range(200)]
        return [*crowd, *alone], before, memory()

    with served(store_root) as address:
        exceptions, before, after = asyncio.run(visits(address))
    assert exceptions == [[]] * 250
    assert after < before + 50


def deleted(run):
    shutil.rmtree(run)


def damaged(run):
    """Change a byte in the middle of every file."""
    for path in [path for path in run.rglob("*") if path.is_file()]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def replaced(run):
    """Another run stands under the name."""
    shutil.rmtree(run)
    shutil.copytree(run.with_name("chain-group_mean-s0"), run)


@pytest.mark.parametrize("change", [deleted, damaged, replaced])
def test_run_that_changes_under_an_open_page_raises_nothing(store_root, tmp_path, change):
    root = shutil.copytree(store_root, tmp_path / "runs")

    async def visits(address):
        async with opened(address, *PAGES) as sessions:
            before = [await session.rerun() for session in sessions]
            change(root / "chain-otb-s0")
            return before, [await session.rerun() for session in sessions]

    with served(root) as address:
        before, after = asyncio.run(visits(address))
    assert [exceptions for exceptions, _ in [*before, *after]] == [[]] * 2 * len(PAGES)
    gone = "chain-otb-s0 cannot be opened here, or no longer"
    for _, warnings in after:
        assert any(gone in text.replace("\\", "") for text in warnings) == (change is not replaced)
