"""Processes that are killed at an event of the file system, of which Python tells by its audit events."""

import os
import sys
import traceback

import torch

KILLED = 9


def forked(function, kill_at=lambda event, arguments: False):
    """Start a function in a copy of this process, which dies before the first event that ``kill_at`` picks."""
    process = os.fork()
    if process:
        return process

    def hook(event, arguments):
        if (event == "open" or event.startswith(("os.", "shutil."))) and kill_at(event, arguments):
            os._exit(KILLED)

    status = 1
    try:
        torch.set_num_threads(1)  # of the parent's other threads, none is left
        sys.addaudithook(hook)
        status = function() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def status_of(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
