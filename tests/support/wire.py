"""Hosts as Linux namespaces, and the network between them: a process of its own, which tests/support/hosts.py starts.

Each host has its own network, host name, /etc/hosts, processes and mounts. The process forwards the frames between the
hosts, so that it can cut a link, delay frames or lose a share of them, also where `tc netem` is missing.

It takes commands on standard input, one a line, and answers each with one line. Everything ends with it: a host ends
when its standard input closes, and Linux removes a network that no process is in. So nothing is left to collide with,
whoever is killed.

    python tests/support/wire.py HOST [HOST ...]        within `unshare --net`
    commands: cut, restore, delay SECONDS, loss SHARE, down HOST (the link of one host only), up HOST
"""

import heapq
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import time

ETH_P_ALL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
HEADER = 10
"""Bytes of virtio_net_hdr before each frame: the checksum that is still open, and how a large frame is split."""
LARGEST = 1 << 17

HOST = """
set -e
hostname "$0"
mount --bind "$1" /etc/hosts
ip link set lo up
echo ready
while read -r line; do :; done
"""
"""Process 1 of a host. It ends when its standard input does, and all processes of the host with it."""


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def start_host(name: str, number: int, hosts_file: str) -> "subprocess.Popen[str]":
    """Start a host and its link; return the process whose namespaces are the host's."""
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    host = subprocess.Popen(
        [*command, "bash", "-c", HOST, name, hosts_file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    if host.stdout.readline() != "ready\n":
        raise OSError(f"host {name} did not start")
    inside = ["nsenter", f"--net=/proc/{host.pid}/ns/net"]
    run("ip", "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
    run("ip", "link", "set", f"port{number}", "up")
    run(*inside, "ip", "address", "add", f"{address(number)}/24", "dev", "eth0")
    run(*inside, "ip", "link", "set", "eth0", "up")
    return host


def open_port(number: int) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    port.bind((f"port{number}", ETH_P_ALL))
    return port


class Wire:
    """A switch that sends each frame to every other host: with a few hosts, the extra frames do not matter."""

    def __init__(self, names: list[str]) -> None:
        self.ports = {name: open_port(number) for number, name in enumerate(names)}
        self.is_up = dict.fromkeys(names, True)
        self.delay = 0.0
        self.loss = 0.0
        self.draw = random.Random(0)
        self.waiting: list[tuple[float, int, str, bytes]] = []
        self.count = 0

    def command(self, word: str, value: str = "") -> None:
        if word in ("cut", "restore"):
            self.is_up = dict.fromkeys(self.is_up, word == "restore")
        elif word in ("down", "up"):
            self.is_up[value] = word == "up"
        elif word == "delay":
            self.delay = float(value)
        else:
            self.loss = float(value)

    def receive(self, name: str) -> bool:
        """Take a frame; return False if the link is gone with its host. Both may be reported together."""
        try:
            frame = self.ports[name].recv(LARGEST)
        except OSError:
            return False
        if len(frame) > HEADER and self.is_up[name] and self.draw.random() >= self.loss:
            self.count += 1
            heapq.heappush(self.waiting, (time.monotonic() + self.delay, self.count, name, frame))
        return True

    def send_due(self) -> float:
        """Send the frames whose time has come; return seconds until the next one."""
        while self.waiting and (wait := self.waiting[0][0] - time.monotonic()) > 0:
            return wait
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            _, _, source, frame = heapq.heappop(self.waiting)
            for name, port in self.ports.items():
                if name != source and self.is_up[name] and self.is_up[source]:
                    try:
                        port.send(frame)
                    except OSError:  # the other host is gone
                        continue
        return 3600.0 if not self.waiting else 0.0

    def serve(self) -> None:
        """Forward frames until standard input ends."""
        poll = select.poll()
        names = {port.fileno(): name for name, port in self.ports.items()}
        for number in (*names, 0):
            poll.register(number, select.POLLIN)
        while True:
            for number, event in poll.poll(max(0, self.send_due() * 1000)):
                if number == 0:
                    lines = os.read(0, LARGEST).decode().splitlines()
                    if not lines:
                        return
                    for line in lines:
                        self.command(*line.split())
                        print("done", flush=True)
                elif not (event & select.POLLIN and self.receive(names[number])):
                    poll.unregister(number)


def main() -> None:
    names = sys.argv[1:]
    with tempfile.NamedTemporaryFile("w") as hosts_file:
        lines = ["127.0.0.1 localhost", *(f"{address(number)} {name}" for number, name in enumerate(names))]
        hosts_file.write("\n".join(lines) + "\n")
        hosts_file.flush()
        hosts = [start_host(name, number, hosts_file.name) for number, name in enumerate(names)]
    print(*(host.pid for host in hosts), flush=True)
    Wire(names).serve()
    for host in hosts:
        host.communicate()


if __name__ == "__main__":
    main()
