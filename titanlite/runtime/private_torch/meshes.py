"""Parts of a device mesh that PyTorch's public slicing does not give."""

from torch.distributed.device_mesh import DeviceMesh


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Return neighbouring axes of a mesh as one axis, with a process group of its own. Further calls return the same.

    Args:
        name: of the new axis.
    """
    return mesh[axes]._flatten(name)


def unflatten_axis(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of one axis as a mesh of several, each with process groups of its own."""
    return mesh._unflatten(0, sizes, names)


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Return one mesh of the axes of several parts of a mesh. No process group is made."""
    return DeviceMesh._concatenate([*meshes])
