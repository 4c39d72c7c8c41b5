// Tables that Arrow's own library has written, read by the module.
#include "runtime/data/table.h"

#include <arrow/api.h>
#include <arrow/io/file.h>
#include <arrow/ipc/writer.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <parquet/arrow/writer.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "runtime/data/document_origins.h"
#include "runtime/data/text_input.h"
#include "runtime/data/tokenize.h"
#include "tests/runtime/data/scratch.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::data;

namespace {

using Columns = std::vector<std::pair<std::string, std::shared_ptr<arrow::Array>>>;

template <typename Builder, typename... Args, typename Fill>
std::shared_ptr<arrow::Array> made(const Fill& fill, Args&&... args) {
  Builder builder(std::forward<Args>(args)...);
  fill(builder);
  return builder.Finish().ValueOrDie();
}

std::shared_ptr<arrow::Array> texts(const std::vector<std::string>& values) {
  return made<arrow::StringBuilder>([&](arrow::StringBuilder& out) { CHECK(out.AppendValues(values).ok()); });
}

std::shared_ptr<arrow::Table> table_of(const Columns& columns) {
  std::vector<std::shared_ptr<arrow::Field>> fields;
  std::vector<std::shared_ptr<arrow::Array>> arrays;
  for (const auto& [name, array] : columns) {
    fields.push_back(arrow::field(name, array->type()));
    arrays.push_back(array);
  }
  return arrow::Table::Make(arrow::schema(fields), arrays);
}

enum class Form { kParquet, kFile, kStream };

void write_table(const std::string& path, const arrow::Table& table, Form form = Form::kParquet, int64_t rows = 64) {
  const auto sink = arrow::io::FileOutputStream::Open(path).ValueOrDie();
  if (form == Form::kParquet) {
    const auto how =
        parquet::WriterProperties::Builder().compression(parquet::Compression::SNAPPY)->enable_page_checksum()->build();
    REQUIRE(parquet::arrow::WriteTable(table, arrow::default_memory_pool(), sink, rows, how).ok());
  } else {
    const auto writer = form == Form::kFile ? arrow::ipc::MakeFileWriter(sink, table.schema()).ValueOrDie()
                                            : arrow::ipc::MakeStreamWriter(sink, table.schema()).ValueOrDie();
    REQUIRE(writer->WriteTable(table, rows).ok());
    REQUIRE(writer->Close().ok());
  }
  REQUIRE(sink->Close().ok());
}

/// The lines of a table; what refuses it.
std::string lines_of(const std::string& path, const std::string& column = "") {
  auto in = TextInput::open(path, TextRule::kRows);
  REQUIRE_OK(in);
  if (!column.empty()) in.value().only_column(column);
  std::string out, part;
  do {
    if (const Status read = in.value().read(1000, &part); !read.ok()) return read.error().message;
    out += part;
  } while (part.size() == 1000);
  CHECK(in.value().taken_bytes() == in.value().size_bytes());
  return out;
}

TokenizeArgs args_for(const std::string& input, const std::string& prefix) {
  TokenizeArgs args;
  args.inputs = {input};
  args.output_prefix = prefix;
  args.tokenizer = {.kind = TokenizerConfig::Kind::kBytes};
  args.separator = DocumentSeparator::kJsonLine;
  return args;
}

}  // namespace

TEST_SUITE("runtime/arrow/table") {
  TEST_CASE("a table of any form gives the pair of its rows as JSON lines, for any number of threads") {
    const TempDir dir;
    std::vector<std::string> values;
    std::string rows;
    for (int i = 0; i < 3000; ++i) {
      values.push_back(i % 100 == 7 ? std::string(static_cast<size_t>(i) * 40, 'x') : fmt::format("row {} of many", i));
      rows += fmt::format("{{\"content\": \"{}\"}}\n", values.back());
    }
    const auto table =
        table_of({{"id", texts(std::vector<std::string>(values.size(), "other"))}, {"content", texts(values)}});
    write_file(dir / "in.jsonl", rows);
    TokenizeArgs args = args_for(dir / "in.jsonl", dir / "lines");
    args.json_key = "content";
    const auto expected = tokenize_file(args);
    REQUIRE_OK(expected);
    for (const Form form : {Form::kParquet, Form::kFile, Form::kStream}) {
      write_table(dir / "in.table", *table, form);
      for (const int64_t threads : {1, 3}) {
        CAPTURE(threads);
        args = args_for(dir / "in.table", dir / "rows");
        args.json_key = "content";
        args.threads = threads;
        args.overwrite = true;
        const auto done = tokenize_file(args);
        REQUIRE_OK(done);
        CHECK(done.value().bytes == std::ssize(rows));
        CHECK(read_file(dir / "rows.bin") == read_file(dir / "lines.bin"));
        CHECK(read_file(dir / "rows.idx") == read_file(dir / "lines.idx"));
      }
      const auto origins = DocumentOrigins::open(dir / "rows", 3000, expected.value().tokens);
      REQUIRE_OK(origins);
      REQUIRE(origins.value());
      CHECK(origins.value()->files() == std::vector<OriginFile>{{dir / "in.table", Packing::kTable}});
      CHECK(origins.value()->read(2998, 2).value() == std::vector<DocumentOrigin>{{0, 2999}, {0, 3000}});
    }
  }

  TEST_CASE("cells of each type are JSON, and a row leaves its nulls out") {
    const TempDir dir;
    const auto turns = std::make_shared<arrow::StructBuilder>(
        arrow::struct_({arrow::field("role", arrow::utf8()), arrow::field("weight", arrow::int64())}),
        arrow::default_memory_pool(),
        std::vector<std::shared_ptr<arrow::ArrayBuilder>>{std::make_shared<arrow::StringBuilder>(),
                                                          std::make_shared<arrow::Int64Builder>()});
    arrow::ListBuilder list(arrow::default_memory_pool(), turns);
    auto& role = static_cast<arrow::StringBuilder&>(*turns->field_builder(0));
    auto& weight = static_cast<arrow::Int64Builder&>(*turns->field_builder(1));
    CHECK(list.Append().ok());
    for (const char* const name : {"user", "a\"b\\c\n\x01\xc3\xa9"}) {
      CHECK((turns->Append().ok() && role.Append(name).ok()));
      CHECK((name[0] == 'u' ? weight.AppendNull() : weight.Append(-7)).ok());
    }
    CHECK(list.AppendNull().ok());
    const auto table = table_of(
        {{"turns", list.Finish().ValueOrDie()},
         {"real", made<arrow::DoubleBuilder>([](auto& out) {
            CHECK(out.AppendValues(std::vector<double>{0.1, std::numeric_limits<double>::infinity()}).ok());
          })},
         {"flag", made<arrow::BooleanBuilder>([](auto& out) {
            CHECK(out.AppendValues(std::vector<bool>{true, false}).ok());
          })},
         {"large",
          made<arrow::LargeStringBuilder>([](auto& out) { CHECK((out.Append("").ok() && out.AppendNull().ok())); })},
         {"word", made<arrow::StringDictionaryBuilder>(
                      [](auto& out) { CHECK((out.Append("one").ok() && out.Append("one").ok())); })},
         {"day", made<arrow::Date32Builder>([](auto& out) {
            CHECK(out.AppendValues(std::vector<int32_t>{0, 1}).ok());
          })}});
    const std::string expected =
        "{\"turns\": [{\"role\":\"user\"},{\"role\":\"a\\\"b\\\\c\\n\\u0001\xc3\xa9\",\"weight\":-7}], \"real\": 0.1, "
        "\"flag\": true, \"large\": \"\", \"word\": \"one\", \"day\": \"1970-01-01\"}\n"
        "{\"real\": null, \"flag\": false, \"word\": \"one\", \"day\": \"1970-01-02\"}\n";
    for (const Form form : {Form::kParquet, Form::kFile, Form::kStream}) {
      write_table(dir / "in.table", *table, form, 1);
      CHECK(lines_of(dir / "in.table") == expected);
      CHECK(lines_of(dir / "in.table", "large") == "{\"large\": \"\"}\n{\"large\": null}\n");
    }
  }

  TEST_CASE("chat rows come from a table") {
    const TempDir dir;
    write_table(dir / "in.parquet",
                *table_of({{"prompt", texts({"1+1?", "2+2?"})}, {"response", texts({"2.", "4."})}}));
    write_file(dir / "in.jsonl",
               "{\"prompt\": \"1+1?\", \"response\": \"2.\"}\n{\"prompt\": \"2+2?\", \"response\": \"4.\"}\n");
    for (const char* const name : {"in.parquet", "in.jsonl"}) {
      TokenizeArgs args = args_for(dir / name, dir / (name + std::string("-set")));
      args.chat = "plain";
      const auto done = tokenize_file(args);
      REQUIRE_OK(done);
      CHECK(done.value().documents == 2);
    }
    for (const char* const end : {".bin", ".idx", ".loss"})
      CHECK(read_file(dir / (std::string("in.parquet-set") + end)) ==
            read_file(dir / (std::string("in.jsonl-set") + end)));
  }

  TEST_CASE("a mistake names the table and its row or its columns") {
    const TempDir dir;
    const std::string path = dir / "in.parquet";
    write_table(path, *table_of({{"id", texts({"a", "b"})}, {"body", made<arrow::StringBuilder>([](auto& out) {
                                                               CHECK((out.Append("one").ok() && out.AppendNull().ok()));
                                                             })}}));
    CHECK(lines_of(path, "text") ==
          path + ": has no column named \"text\"; --json-key names one of its columns: id, body");
    TokenizeArgs args = args_for(path, dir / "out");
    args.json_key = "body";
    const auto refused = tokenize_file(args);
    REQUIRE_FALSE(refused.ok());
    CHECK_MESSAGE(says(refused.error().message, {path + ": row 2: "}), refused.error().message);
    CHECK_FALSE(std::filesystem::exists(dir / "out.bin"));
    args.separator = DocumentSeparator::kWholeFile;
    const auto as_text = tokenize_file(args);
    REQUIRE_FALSE(as_text.ok());
    CHECK_MESSAGE(says(as_text.error().message, {"is a parquet table"}), as_text.error().message);
  }

  TEST_CASE("a table that is cut is refused, and one with a byte changed is no crash") {
    const TempDir dir;
    const std::string path = dir / "in.table";
    std::vector<std::string> values;
    for (int i = 0; i < 40; ++i) values.push_back(fmt::format("some words of row {}", i * 7919));
    for (const Form form : {Form::kParquet, Form::kFile, Form::kStream}) {
      write_table(path, *table_of({{"text", texts(values)}}), form);
      const std::string good = read_file(path), rows = lines_of(path, "text");
      size_t refused = 0;
      for (size_t cut = 16; cut < good.size(); cut += cut + 24 < good.size() ? 31 : 1) {
        write_file(path, good.substr(0, cut));
        CHECK_MESSAGE(lines_of(path, "text").starts_with(path), cut);
      }
      for (size_t at = 16; at < good.size(); at += 13) {
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ 0x55);
        write_file(path, bad);
        const std::string found = lines_of(path, "text");
        refused += found.starts_with(path) ? 1 : 0;
        // Pages of parquet have checksums, Arrow's batches have none.
        if (form == Form::kParquet) CHECK_MESSAGE((found.starts_with(path) || found == rows), at);
      }
      CAPTURE(static_cast<int>(form));
      CHECK(refused > 0);
    }
  }
}
