"""The bytes that a collective puts on the wire, on a ring of devices.

The rings are those of ZeRO (Rajbhandari et al. 2020, section 7), after Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005.
"""


def ring_bytes(kind: str, payload_bytes: int, group_size: int) -> float:
    """Bytes that each device sends, on a ring of g devices and for a payload of b bytes.

    An all-reduce sends 2(g-1)/g b, a permute b (from its busiest device), any other collective (g-1)/g b. One device
    alone (g = 1) sends 0 bytes.

    Args:
        kind: "all-reduce", "all-gather", ..., as `inspect.Collective.kind`.
        payload_bytes: b, as `inspect.Collective.bytes`.
        group_size: g, the number of devices that take part.

    >>> ring_bytes("all-reduce", 800, 8)
    1400.0
    """
    if group_size <= 1:
        return 0.0
    if kind == "collective-permute":
        return float(payload_bytes)
    factor = 2 if kind == "all-reduce" else 1
    return factor * (group_size - 1) * payload_bytes / group_size
