"""From a released checkpoint, or from another container, to a container; and the check of one."""
from warp_embed.convert.job import ConvertReport, convert

__all__ = ["ConvertReport", "convert"]
