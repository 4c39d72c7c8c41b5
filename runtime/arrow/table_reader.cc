#include "runtime/arrow/table_reader.h"

#include <arrow/api.h>
#include <arrow/io/file.h>
#include <arrow/ipc/reader.h>
#include <arrow/util/io_util.h>
#include <fmt/format.h>
#include <parquet/arrow/reader.h>
#include <parquet/arrow/schema.h>
#include <parquet/file_reader.h>
#include <parquet/metadata.h>

#include <algorithm>
#include <new>
#include <numeric>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/arrow/json_rows.h"

namespace cairn::data {
namespace {

constexpr size_t kLinesBytes = 256 << 10;          // of one read()
constexpr int64_t kBatchBytes = int64_t{4} << 20;  // of decoded rows
constexpr int64_t kMostBatchRows = 64 << 10;

Error error_of(const arrow::Status& status) {
  if (status.IsOutOfMemory()) return {ErrorCode::kInternal, "no memory for a batch of rows: " + status.message()};
  if (const int number = arrow::internal::ErrnoFromStatus(status); number != 0)
    return {ErrorCode::kIo, status.message(), number};
  if (status.IsNotImplemented()) return {ErrorCode::kUnsupported, "Arrow cannot read it: " + status.message()};
  return {ErrorCode::kCorrupt, "is damaged: " + status.message()};
}

/// Arrow's value, or its error as one of ours. Parquet's own layer throws.
template <typename Call>
auto call(Call&& what) -> Result<typename std::invoke_result_t<Call>::ValueType> {
  try {
    auto found = what();
    if (!found.ok()) return error_of(found.status());
    return std::move(found).ValueUnsafe();
  } catch (const std::bad_alloc&) {
    return Error{ErrorCode::kInternal, "no memory for a batch of rows"};
  } catch (const std::exception& error) {
    return Error{ErrorCode::kCorrupt, fmt::format("is damaged: {}", error.what())};
  }
}

/// The place of the only column that is read; -1: all are.
Result<int> column_of(const arrow::Schema& schema, const std::string& name) {
  if (name.empty()) return -1;
  const std::vector<int> found = schema.GetAllFieldIndices(name);
  if (found.size() == 1) return found[0];
  constexpr size_t kNamed = 12;
  std::vector<std::string> names = schema.field_names();
  const bool more = names.size() > kNamed;
  names.resize(std::min(kNamed, names.size()));
  return Error{ErrorCode::kInvalidInput, fmt::format("has {} named \"{}\"; --json-key names one of its columns: {}{}",
                                                     found.empty() ? "no column" : "several columns", name,
                                                     fmt::join(names, ", "), more ? ", ..." : "")};
}

/// Writes the rows of one batch after the other.
class BatchedReader : public TableReader {
 public:
  Result<bool> read(std::string* out) final {
    const size_t until = out->size() + kLinesBytes;
    while (out->size() < until) {
      if (!batch_ || row_ == batch_->num_rows()) {
        RT_TRY_SET(batch_, next_batch());
        row_ = 0;
        if (!batch_) {
          done_ = 1;
          return out->size() + kLinesBytes > until;
        }
        columns_ = batch_->columns();
        if (column_ >= 0) columns_ = {columns_[static_cast<size_t>(column_)]};
        names_.clear();
        for (int k = 0; k < batch_->num_columns(); ++k) names_.push_back(batch_->schema()->field(k)->name());
        if (column_ >= 0) names_ = {names_[static_cast<size_t>(column_)]};
      }
      RT_TRY(append_row(out));
      ++row_;
    }
    return true;
  }
  double done() const final { return done_; }

 protected:
  /// `column`: of each batch, the only one to be written; -1: all.
  explicit BatchedReader(int column, bool keep_null) : column_(column), keep_null_(keep_null) {}
  /// Null: there is no more.
  virtual Result<std::shared_ptr<arrow::RecordBatch>> next_batch() = 0;
  void set_done(double part) { done_ = part; }

 private:
  Status append_row(std::string* out) const {
    *out += '{';
    bool first = true;
    for (size_t k = 0; k < columns_.size(); ++k) {
      if (!keep_null_ && columns_[k]->IsNull(row_)) continue;
      if (!std::exchange(first, false)) *out += ", ";
      append_json_string(names_[k], out);
      *out += ": ";
      RT_TRY(append_json(*columns_[k], row_, out).with(fmt::format("column \"{}\"", names_[k])));
    }
    *out += "}\n";
    return {};
  }

  const int column_;
  const bool keep_null_;  // the one column that is named: its null is a mistake to be named with its row
  std::shared_ptr<arrow::RecordBatch> batch_;
  std::vector<std::shared_ptr<arrow::Array>> columns_;
  std::vector<std::string> names_;
  int64_t row_ = 0;  // of the batch, to be written next
  double done_ = 0;
};

/// The leaf columns of parquet below a field of Arrow.
void add_leaves(const parquet::arrow::SchemaField& field, std::vector<int>* out) {
  if (field.column_index >= 0) out->push_back(field.column_index);
  for (const parquet::arrow::SchemaField& child : field.children) add_leaves(child, out);
}

/// Rows of a batch of some kBatchBytes in the widest row group.
int64_t batch_rows(const parquet::FileMetaData& metadata, const std::vector<int>& leaves) {
  int64_t rows = kMostBatchRows;
  for (int g = 0; g < metadata.num_row_groups(); ++g) {
    const auto group = metadata.RowGroup(g);
    int64_t bytes = 0;
    for (const int leaf : leaves) bytes += group->ColumnChunk(leaf)->total_uncompressed_size();
    rows = std::min(rows, group->num_rows() * kBatchBytes / std::max<int64_t>(bytes, 1));
  }
  return std::max<int64_t>(rows, 1);
}

class ParquetReader final : public BatchedReader {
 public:
  static Result<std::unique_ptr<TableReader>> open(std::shared_ptr<arrow::io::RandomAccessFile> file,
                                                   const std::string& column) {
    parquet::ReaderProperties properties;
    properties.enable_buffered_stream();  // pages come as they are needed, not a row group at a time
    properties.set_buffer_size(1 << 20);
    properties.set_page_checksum_verification(true);
    parquet::arrow::FileReaderBuilder builder;
    RT_TRY_SET(std::unique_ptr<parquet::arrow::FileReader> reader,
               call([&]() -> arrow::Result<std::unique_ptr<parquet::arrow::FileReader>> {
                 ARROW_RETURN_NOT_OK(builder.Open(std::move(file), properties));
                 parquet::ArrowReaderProperties of_arrow(/*use_threads=*/false);
                 of_arrow.set_pre_buffer(false);
                 return builder.properties(of_arrow)->Build();
               }));
    std::shared_ptr<arrow::Schema> schema;
    if (const arrow::Status got = reader->GetSchema(&schema); !got.ok()) return error_of(got);
    RT_TRY_SET(const int field, column_of(*schema, column));
    std::vector<int> leaves;
    const std::vector<parquet::arrow::SchemaField>& fields = reader->manifest().schema_fields;
    for (size_t k = 0; k < fields.size(); ++k) {
      if (field < 0 || static_cast<int>(k) == field) add_leaves(fields[k], &leaves);
    }
    std::vector<int> groups(static_cast<size_t>(reader->num_row_groups()));
    std::iota(groups.begin(), groups.end(), 0);
    const parquet::FileMetaData& metadata = *reader->parquet_reader()->metadata();
    reader->set_batch_size(batch_rows(metadata, leaves));
    RT_TRY_SET(std::unique_ptr<arrow::RecordBatchReader> batches,
               call([&] { return reader->GetRecordBatchReader(groups, leaves); }));
    return std::unique_ptr<TableReader>(
        new ParquetReader(std::move(reader), std::move(batches), metadata.num_rows(), field >= 0));
  }

 private:
  ParquetReader(std::unique_ptr<parquet::arrow::FileReader> reader, std::unique_ptr<arrow::RecordBatchReader> batches,
                int64_t rows, bool one_column)
      : BatchedReader(one_column ? 0 : -1, one_column),
        reader_(std::move(reader)),
        batches_(std::move(batches)),
        rows_(rows) {}

  Result<std::shared_ptr<arrow::RecordBatch>> next_batch() override {
    RT_TRY_SET(std::shared_ptr<arrow::RecordBatch> batch, call([&] { return batches_->Next(); }));
    if (!batch) return batch;
    set_done(static_cast<double>(read_) / static_cast<double>(std::max<int64_t>(rows_, 1)));
    read_ += batch->num_rows();
    return batch;
  }

  std::unique_ptr<parquet::arrow::FileReader> reader_;  // outlives the batches
  std::unique_ptr<arrow::RecordBatchReader> batches_;
  const int64_t rows_;
  int64_t read_ = 0;
};

/// Whatever the file says, no offset leads out of its buffers.
Result<std::shared_ptr<arrow::RecordBatch>> validated(std::shared_ptr<arrow::RecordBatch> batch) {
  if (!batch) return batch;
  if (const arrow::Status good = batch->ValidateFull(); !good.ok()) return error_of(good);
  return batch;
}

arrow::ipc::IpcReadOptions without_threads() {
  arrow::ipc::IpcReadOptions options = arrow::ipc::IpcReadOptions::Defaults();
  options.use_threads = false;
  return options;
}

class ArrowFileReader final : public BatchedReader {
 public:
  static Result<std::unique_ptr<TableReader>> open(std::shared_ptr<arrow::io::RandomAccessFile> file,
                                                   const std::string& column) {
    RT_TRY_SET(std::shared_ptr<arrow::ipc::RecordBatchFileReader> reader,
               call([&] { return arrow::ipc::RecordBatchFileReader::Open(std::move(file), without_threads()); }));
    RT_TRY_SET(const int field, column_of(*reader->schema(), column));
    return std::unique_ptr<TableReader>(new ArrowFileReader(std::move(reader), field));
  }

 private:
  ArrowFileReader(std::shared_ptr<arrow::ipc::RecordBatchFileReader> reader, int field)
      : BatchedReader(field, field >= 0), reader_(std::move(reader)) {}

  Result<std::shared_ptr<arrow::RecordBatch>> next_batch() override {
    if (next_ == reader_->num_record_batches()) return std::shared_ptr<arrow::RecordBatch>();
    set_done(static_cast<double>(next_) / reader_->num_record_batches());
    RT_TRY_SET(std::shared_ptr<arrow::RecordBatch> batch, call([&] { return reader_->ReadRecordBatch(next_++); }));
    return validated(std::move(batch));
  }

  std::shared_ptr<arrow::ipc::RecordBatchFileReader> reader_;
  int next_ = 0;
};

class ArrowStreamReader final : public BatchedReader {
 public:
  static Result<std::unique_ptr<TableReader>> open(std::shared_ptr<arrow::io::RandomAccessFile> file,
                                                   const std::string& column) {
    RT_TRY_SET(std::shared_ptr<arrow::ipc::RecordBatchStreamReader> reader,
               call([&] { return arrow::ipc::RecordBatchStreamReader::Open(file, without_threads()); }));
    RT_TRY_SET(const int field, column_of(*reader->schema(), column));
    return std::unique_ptr<TableReader>(new ArrowStreamReader(std::move(file), std::move(reader), field));
  }

 private:
  ArrowStreamReader(std::shared_ptr<arrow::io::RandomAccessFile> file,
                    std::shared_ptr<arrow::ipc::RecordBatchStreamReader> reader, int field)
      : BatchedReader(field, field >= 0), file_(std::move(file)), reader_(std::move(reader)) {}

  Result<std::shared_ptr<arrow::RecordBatch>> next_batch() override {
    RT_TRY_SET(std::shared_ptr<arrow::RecordBatch> batch, call([&] { return reader_->Next(); }));
    if (!batch) RT_TRY(check_end());
    return validated(std::move(batch));
  }

  /// Arrow takes the end of the file for the end of the stream, also between two batches.
  Status check_end() {
    constexpr std::string_view kEnd("\xff\xff\xff\xff\0\0\0\0", 8);
    RT_TRY_SET(const int64_t at, call([&] { return file_->Tell(); }));
    RT_TRY_SET(const auto last, call([&] { return file_->ReadAt(at - std::ssize(kEnd), std::ssize(kEnd)); }));
    if (std::string_view(*last) == kEnd) return {};
    return Error{ErrorCode::kCorrupt,
                 fmt::format("byte {}: the stream ends without its mark: it was cut, or is still being written", at)};
  }

  std::shared_ptr<arrow::io::RandomAccessFile> file_;
  std::shared_ptr<arrow::ipc::RecordBatchStreamReader> reader_;
};

}  // namespace

Result<std::unique_ptr<TableReader>> make_table_reader(TableArgs args) {
  RT_TRY_SET(std::shared_ptr<arrow::io::RandomAccessFile> file,
             call([&] { return arrow::io::ReadableFile::Open(args.fd.get()); }));
  args.fd.release();  // the file has it
  if (args.kind == TableKind::kParquet) return ParquetReader::open(std::move(file), args.column);
  if (args.kind == TableKind::kArrowFile) return ArrowFileReader::open(std::move(file), args.column);
  return ArrowStreamReader::open(std::move(file), args.column);
}

}  // namespace cairn::data
