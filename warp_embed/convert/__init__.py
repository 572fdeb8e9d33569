"""From a released checkpoint, or from another container, to a container; and the check of one."""
from warp_embed.convert.config_only import outline
from warp_embed.convert.estimate import Estimate
from warp_embed.convert.job import ConvertReport, convert
from warp_embed.convert.verify import KindReport, VerifyReport, verify

__all__ = ["ConvertReport", "Estimate", "KindReport", "VerifyReport", "convert", "outline", "verify"]
