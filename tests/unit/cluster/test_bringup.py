import socket
import subprocess

import pytest

from cluster.bringup import LocalRay, RayOptions, free_port, require_free_port
from cluster.errors import PortInUse
from cluster.inventory import read_inventory


def test_a_port_in_use_is_refused_with_advice():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use: .*PORT=8001"):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)


def test_a_free_port_is_free():
    require_free_port("127.0.0.1", free_port())


def test_a_machine_without_gpus_has_an_empty_inventory():
    inventory = read_inventory()
    assert len(inventory.devices) == 0 or inventory.driver_version is not None


def test_the_end_spares_processes_that_are_not_its_own():
    other = subprocess.Popen(["sleep", "60"])
    try:
        LocalRay(RayOptions(num_cpus=1)).__exit__(None, None, None)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
