"""PyInstaller hook: the extension modules import each other from C, where its analysis cannot look."""
from PyInstaller.utils.hooks import collect_data_files, collect_submodules

hiddenimports = collect_submodules("warp_embed.engine")
datas = collect_data_files("warp_embed", includes=["demo.waste/*"])
