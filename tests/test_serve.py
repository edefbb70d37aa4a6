import socket

import pytest

from otb_analysis.errors import InputError
from otb_analysis.serve import free_port


def test_a_taken_port_gives_way_to_the_next_free_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < free_port(port) <= port + 19


@pytest.mark.parametrize("port", [0, -1, 70000])
def test_a_number_that_is_no_port_is_named(port):
    with pytest.raises(InputError, match=f"--port is {port}"):
        free_port(port)
