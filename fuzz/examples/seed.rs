//! Writes `corpus/decode` from the captured frames: for each server, form and table the whole
//! stream in pieces, each piece behind the Relation and Type frames that came before it.

#[path = "../../tests/support/fixture.rs"]
mod fixture;

use std::{fs, io, path::Path};

/// Frames that tell what later ones mean.
fn is_description(frame: &[u8]) -> bool {
    matches!(frame.first(), Some(b'R' | b'Y'))
}

fn push(seed: &mut Vec<u8>, frame: &[u8]) {
    if let Ok(len) = u16::try_from(frame.len()) {
        seed.extend(len.to_be_bytes());
        seed.extend(frame);
    }
}

fn main() -> io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/decode");
    fs::create_dir_all(&corpus)?;
    for fixture in fixture::all() {
        for stream in fixture.streams {
            // Pieces begin at a Begin, so that each is a run of whole transactions.
            let begins = stream.frames.iter().enumerate().filter(|(_, frame)| frame[0] == b'B');
            let mut cuts: Vec<usize> = begins.map(|(index, _)| index).step_by(10).collect();
            cuts.push(stream.frames.len());
            for (piece, range) in cuts.windows(2).enumerate() {
                for table in 0..6_u8 {
                    let mut seed = vec![table];
                    let before = stream.frames[..range[0]].iter();
                    for frame in before.filter(|frame| is_description(frame)) {
                        push(&mut seed, frame);
                    }
                    for frame in &stream.frames[range[0]..range[1]] {
                        push(&mut seed, frame);
                    }
                    let name = format!("{}-{}-{piece}-{table}", fixture.server, stream.name);
                    fs::write(corpus.join(name), seed)?;
                }
            }
        }
    }
    Ok(())
}
