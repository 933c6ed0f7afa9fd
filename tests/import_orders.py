"""Orders of imports, each tried in a process of its own that has loaded what takes long."""

import subprocess
import sys

ORDERS = """
import os, sys
import {loaded}  # once, for they take long

def check(first):
    exec(first)
{check}

for first in {orders!r}:
    if not (child := os.fork()):
        status = 1
        try:
            check(first)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, first
"""


def run_python(code):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_behind_each(orders, check, loaded):
    """Run the statements ``check``, indented, behind each of ``orders``, in a copy of a process with these modules."""
    run_python(ORDERS.format(orders=orders, check=check.strip("\n"), loaded=loaded))
