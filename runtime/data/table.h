#pragma once
// Tables (parquet, Arrow's files and streams) as JSON lines, a row a line. Arrow's library reads them, in a module
// (runtime/arrow, libcairn_arrow.so) that a build makes with -DCAIRN_ARROW=DIR. The first table loads it.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::data {

enum class TableKind { kNone, kParquet, kArrowFile, kArrowStream };

/// By the first bytes of a file: 8 suffice.
TableKind table_kind(std::string_view begin);

/// Whether the name says that the file is a table: .parquet, .arrow, .feather.
bool named_as_table(std::string_view path);

struct TableArgs {
  TableKind kind = TableKind::kNone;
  Fd fd;               // a file
  std::string column;  // the only one that is read; empty: all, each row without its nulls
};

/// Rows in order. Memory: a few MiB of rows as they are stored (a dictionary's long value counts once, and is held for
/// each of its rows), or the longest row, and the pages that they come from; of Arrow's files and streams a batch, as
/// their writer made it. Threads: one at a time.
class TableReader {
 public:
  virtual ~TableReader() = default;
  TableReader(const TableReader&) = delete;
  TableReader& operator=(const TableReader&) = delete;

  /// Appends the lines of the next rows, some hundred KiB, to `out`; false: there is no more. Errors, without the
  /// file's name: kCorrupt, kIo, kUnsupported for a column of a type that has no JSON.
  virtual Result<bool> read(std::string* out) = 0;
  /// The part of all rows that was read, 0 to 1; of a stream 0 until its end.
  virtual double done() const = 0;

 protected:
  TableReader() = default;
};

/// These types cross to the module: a change of one of them is a new version.
inline constexpr uint32_t kArrowModuleVersion = 1;
struct ArrowModule {
  uint32_t version = 0;
  void (*open)(TableArgs args, Result<std::unique_ptr<TableReader>>* out);  // as open_table()
};

/// Null: there is no module. Errors, without the file's name: kUnsupported for a module that cannot be loaded or is of
/// another version; kCorrupt for a damaged table; kInvalidInput for a column that the table does not have; kIo.
Result<std::unique_ptr<TableReader>> open_table(TableArgs args);

}  // namespace cairn::data
