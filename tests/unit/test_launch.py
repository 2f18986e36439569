"""Options of run_train.sh's launcher for torchrun."""

import socket

from titanlite.tools.launch import address_options, interface_of, use_interface_of

LOOPBACK = dict(socket.if_nameindex())[1]


def test_without_an_address_torchrun_finds_its_own() -> None:
    assert address_options("node0:29500", {}) == []
    assert address_options("node0:29500", {"LOCAL_ADDR": "", "RDZV_CONF": ""}) == []
    assert address_options("node0:29500", {"RDZV_CONF": "join_timeout=60"}) == ["--rdzv-conf=join_timeout=60"]


def test_the_machine_of_the_endpoint_hosts_the_rendezvous() -> None:
    first, second = {"LOCAL_ADDR": "10.0.0.1", "RDZV_CONF": "join_timeout=60"}, {"LOCAL_ADDR": "10.0.0.2"}
    assert address_options("10.0.0.1:29500", first) == [
        "--local-addr=10.0.0.1",
        "--rdzv-conf=join_timeout=60,is_host=1",
    ]
    assert address_options("10.0.0.1:29500", second) == ["--local-addr=10.0.0.2", "--rdzv-conf=is_host=0"]


def test_gloo_uses_the_interface_of_the_address() -> None:
    assert interface_of("127.0.0.1") == LOOPBACK
    assert interface_of("192.0.2.1") is None  # of documentation, RFC 5737
    environ = {"LOCAL_ADDR": "127.0.0.1"}
    use_interface_of(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == LOOPBACK
    for chosen in ({"LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"}, {"LOCAL_ADDR": "192.0.2.1"}, {}):
        environ = dict(chosen)
        use_interface_of(environ)
        assert environ == chosen
