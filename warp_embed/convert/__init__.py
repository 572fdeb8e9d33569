"""From a released checkpoint, or from another container, to a container; and the check of one."""
from warp_embed.convert.job import ConvertReport, convert
from warp_embed.convert.verify import KindReport, VerifyReport, verify

__all__ = ["ConvertReport", "KindReport", "VerifyReport", "convert", "verify"]
