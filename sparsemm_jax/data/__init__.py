"""Documents of text and images, packed into batches.

A source (`sources`) yields documents; a document (`documents`) becomes tokens
(`tokenizer`) and patches (`images`); documents fill rows (`packing`); rows of
several sources are mixed (`mixture`); `pipeline` does it all from a RunConfig.
"""


class DataError(ValueError):
  """Data that cannot be used; the message names the file and the line."""
