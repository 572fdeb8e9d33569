"""PyInstaller hook: the extension modules import each other from C, where its analysis cannot look."""
from PyInstaller.utils.hooks import collect_data_files

hiddenimports = [f"warp_embed.engine.{name}"
                 for name in ("attention", "experts", "forward", "ids", "layout", "linear", "lookahead", "residual")]
datas = collect_data_files("warp_embed", includes=["demo.waste/*"])
