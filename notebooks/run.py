"""Executes the notebooks and stores their output in them: `python notebooks/run.py [name ...]`."""

import pathlib
import sys

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parent

for path in [FOLDER / name for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.metadata.pop("execution", None)  # time stamps would change with every run
        # What TensorFlow's C++ says while it is imported is of no use to a reader.
        cell.outputs = [o for o in cell.get("outputs", []) if "absl::InitializeLog" not in o.get("text", "")]
    nbformat.write(notebook, path)
    print(f"{path.name}: {len(notebook.cells)} cells")
