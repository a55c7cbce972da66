"""``client.py SOCKET [-u] SCRIPT|-m MODULE|-c CODE [ARGUMENTS]``: what that Python would do, in a fork of the server at SOCKET.

Imports next to nothing. Passes on its arguments, environment, folder and standard streams, then every signal; ends as the fork ended.
"""

import ctypes
import json
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # and the server kills the fork of a client that is gone
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    server.sendall(b"fork\n")
    asked = {"argv": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd(), "python": sys.executable}
    body = json.dumps(asked).encode()
    socket.send_fds(server, [f"{len(body):012d}".encode()], [0, 1, 2])
    server.sendall(body)
    answers = server.makefile("r")
    line = answers.readline()
    if not line:
        sys.exit("the warm Python has gone")
    fork = int(line)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda got, _: os.kill(fork, got))
    line = answers.readline()
    status = int(line) if line else 1
    if status < 0:  # the number of the signal that ended it: end likewise
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
