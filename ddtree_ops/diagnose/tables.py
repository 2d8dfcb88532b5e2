"""What numbers of the kernel, of systemd and of exit codes mean, and what to do: data for the solvers."""

from __future__ import annotations

__all__ = ["EXEC_STATUS", "SIGNALS", "UNIT_RESULTS", "XID"]

XID: dict[int, tuple[str, str]] = {
    8: (
        "the GPU stopped processing: a channel timed out, often because its GSP firmware hangs",
        "reset the GPU (nvidia-smi --gpu-reset, or a reboot); if it comes again, update driver and VBIOS",
    ),
    13: (
        (
            "graphics engine exception: a kernel made an illegal access or a wrong instruction; a fault of the program "
            "far more often than of the GPU"
        ),
        (
            "read the server's own CUDA error beside it; run once with CUDA_LAUNCH_BLOCKING=1 and once with "
            "--disable-cuda-graph. If every program fails on this GPU alone, test the hardware (dcgmi diag -r 3)"
        ),
    ),
    31: (
        "GPU memory page fault: a kernel addressed memory that is not mapped, an out-of-range index or a stale pointer",
        (
            "read the server's own CUDA error beside it; run once with CUDA_LAUNCH_BLOCKING=1 and once with "
            "--disable-cuda-graph"
        ),
    ),
    43: (
        "the GPU stopped the work of one process after an error of that process; the GPU itself is well",
        "look for the error of the server before it; restart the unit",
    ),
    45: (
        "the driver removed the work of a process that was ending: a consequence of its end",
        "look for what ended the process before it",
    ),
    48: (
        "an uncorrectable (double-bit) ECC error in GPU memory: what was computed from it is lost",
        (
            "drain the host and reset the GPU so that the row is remapped; replace it if remapping fails (Xid 64) or "
            "errors come back"
        ),
    ),
    62: (
        "the GPU's internal microcontroller halted",
        "reset the GPU or reboot; if it comes again, replace the GPU",
    ),
    74: (
        "an NVLink error: the link between two GPUs or to a switch failed",
        (
            "check nvidia-smi nvlink -e, fabric manager and switch logs; reset the GPUs together or reboot; reseat or "
            "replace the board if the same link fails again"
        ),
    ),
    79: (
        "the GPU has fallen off the bus: the host no longer reaches it over PCIe",
        (
            "power-cycle the host (a reboot may not be enough); check power cables, seat, riser, cooling and BIOS. "
            "Until then no service that needs this GPU can start"
        ),
    ),
    64: (
        "a damaged row of GPU memory could not be remapped",
        "drain the host, reset the GPU, and replace it if nvidia-smi -q -d ROW_REMAPPER still says so",
    ),
    94: (
        "a contained ECC error: the process that used the damaged memory is ended, others go on",
        "restart the unit; drain and reset the GPU at the next occasion, replace it if that comes again",
    ),
    95: (
        "an uncontained ECC error: every process on this GPU is affected and it takes no new work until it is reset",
        "stop everything on the GPU and reset it or reboot; replace it if that comes again",
    ),
    63: (
        "a damaged row of GPU memory is marked for remapping: ECC worked, the service goes on",
        "reset the GPU at the next occasion so that the remapping takes effect",
    ),
    92: (
        "many correctable ECC errors: ECC worked, the service goes on",
        "watch nvidia-smi -q -d ECC; replace the GPU if it goes on",
    ),
    109: (
        "a context switch timed out, usually after the GSP firmware stopped answering",
        "reset the GPU or reboot; update the driver",
    ),
    119: (
        "the driver waited in vain for the GPU's GSP firmware: a GSP RPC time-out",
        (
            "reset the GPU or reboot, a cold start if a warm one does not help; update the driver, or take the GSP out "
            "with NVreg_EnableGpuFirmware=0 where the driver is the proprietary one"
        ),
    ),
    120: (
        "the GPU's GSP firmware ended with an error",
        "reset the GPU or reboot, a cold start if a warm one does not help; update the driver",
    ),
    140: (
        "an unrecovered ECC error",
        "drain the host and reset the GPU; replace it if that comes again",
    ),
    154: (
        "the driver says which recovery the GPU needs now",
        "do what the line names (drain, reset the GPU, or reboot the node) before the unit is started again",
    ),
}
"""Number -> what it means, what to do. NVIDIA's Xid catalog, docs.nvidia.com/deploy/xid-errors."""

SIGNALS: dict[int, str] = {
    4: "SIGILL: an instruction this CPU does not have, a binary built for another CPU",
    6: "SIGABRT: native code aborted itself; its last words (terminate called, what()) stand before",
    7: "SIGBUS: memory behind a mapping was missing, usually /dev/shm full or a file that shrank or cannot be read",
    8: "SIGFPE: an arithmetic error in native code",
    9: "SIGKILL: killed from outside, by hand or by the kernel for host memory",
    11: "SIGSEGV: a crash in native code",
    15: "SIGTERM: asked to end from outside",
}
"""Signal number -> what a process that it ended says."""

EXEC_STATUS: dict[int, tuple[str, str, str]] = {
    200: (
        "CHDIR",
        "the working directory is missing or closed to the user",
        "create WorkingDirectory or correct it",
    ),
    202: ("FDS", "file descriptors could not be set up", "look at the sockets and stdio lines of the unit"),
    203: (
        "EXEC",
        "the program in ExecStart is missing, not executable, or its interpreter is missing",
        "check that the venv's python exists and runs for the unit's user (ls -l, then run it by hand)",
    ),
    205: (
        "LIMITS",
        "a resource limit could not be set",
        "lower the Limit... lines of the unit below the hard limit of systemd",
    ),
    206: (
        "OOM_ADJUST",
        "OOMScoreAdjust could not be set",
        "remove OOMScoreAdjust or run the unit as root",
    ),
    209: ("STDOUT", "the standard output could not be opened", "check the path and rights of StandardOutput"),
    214: (
        "SETSCHEDULER",
        "the CPU scheduling policy could not be set",
        "correct CPUSchedulingPolicy and -Priority",
    ),
    216: ("GROUP", "the group does not exist", "create the group or correct Group"),
    217: ("USER", "the user does not exist", "create the user or correct User (in the inventory: user)"),
    218: (
        "CAPABILITIES",
        "capabilities could not be set",
        "correct the capability lines of the unit; a user unit has none to give",
    ),
    226: (
        "NAMESPACE",
        "a path named in a mount or sandbox setting (ReadWritePaths, BindPaths, PrivateTmp) is missing",
        "create every path that the sandbox lines of the unit name, or prefix it with -",
    ),
    233: ("RUNTIME_DIRECTORY", "it could not be made", "check the space and the rights of /run"),
    238: ("STATE_DIRECTORY", "it could not be made", "check the space and the rights of /var/lib"),
    239: ("CACHE_DIRECTORY", "it could not be made", "check the space and the rights of /var/cache"),
    240: ("LOGS_DIRECTORY", "it could not be made", "check the space and the rights of /var/log"),
    243: (
        "CREDENTIALS",
        "a credential could not be loaded or decrypted",
        "check the file behind LoadCredential or SetCredential and its rights",
    ),
}
"""Exit status of systemd's own step before the program -> its name, meaning, what to do. systemd.exec(5)."""

UNIT_RESULTS: dict[str, str] = {
    "exit-code": "its main process ended with a non-zero status of its own: look for its last words before this line",
    "signal": "its main process was killed by a signal; sglang kills itself with SIGKILL after any failure of a child, "
    "so this is neither the OOM killer nor somebody's kill by itself",
    "core-dump": "its main process crashed in native code and dumped core (coredumpctl info)",
    "watchdog": "it sent no keep-alive in WatchdogSec",
    "timeout": "a start or a stop took longer than the unit allows",
    "protocol": "it did not behave as its Type= demands: sglang sends no readiness message and writes no PID file, so "
    "Type must be exec or simple",
    "resources": "systemd could not get what it needs to start it: usually a missing EnvironmentFile, or no memory",
    "exec-condition": "ExecCondition said no",
}
"""``Result=`` of a unit -> what happened."""
